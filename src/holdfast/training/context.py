"""What an objective gets beside the model and the batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.threats import Threat
from holdfast.training.augment import Transform

Metrics = Mapping[str, Tensor | float]
Objective = Callable[..., tuple[Tensor, Metrics]]
Precision = Literal["full", "bfloat16"]


@dataclass(frozen=True, eq=False)
class Parts:
    """What a recipe sets beside the objective, with its options filled in; None where the recipe has none."""

    attack: partial[Any] | None = None  # finds the adversarial examples
    targets: partial[Any] | None = None  # what the outputs are compared with
    regularizers: Mapping[str, partial[Any]] = field(default_factory=dict)  # terms added to the loss, by name
    perturb_weights: partial[Any] | None = None  # moves the weights before the loss is taken
    top: str | None = None  # name of the model's linear top layer, where a part needs it
    watched: str | None = None  # its name where the log keeps the norm of the features


@dataclass(frozen=True, eq=False)
class Context:
    """One step of a run, as its objective sees it.

    An objective is `(model, x, y, context, *, options) -> (loss, metrics)`: the model maps inputs x (B, ...) to logits
    (B, K), y are labels (B,); `loss` is the mean over the batch, a scalar with gradients for the parameters; `metrics`
    are further means over the batch, for the history. It gets the bare module also under several processes, so it may
    walk the layers (bounds, Lipschitz constants), or evaluate the model at other weights with
    `torch.func.functional_call`, which is how a weight perturbation fits into one objective.

    The tensors of `state` live through the run and go into the checkpoint; change them in place or replace them. A
    cache of per-example perturbations is `state["delta"]`, shape (count, C, H, W), read and written at `index`.
    """

    epoch: int  # counts from 0
    step: int  # optimiser steps before this one, since the start of the run
    progress: float  # fraction of the run at the middle of this step, between 0 and 1
    index: Tensor  # (B,) int64, position of each input in the training split, on the device of x
    noise: Noise  # random numbers of this step, fixed by seed, step and `index`
    transform: Transform  # the augmentation that made x out of the training images
    state: dict[str, Tensor]
    count: int  # number of training examples
    optimizer: Optimizer  # for its learning rate and its own state; the loop takes the step
    adversary: Threat | None  # at the budget scheduled for this step, or None if the recipe has none
    parts: Parts = Parts()  # the other parts of the recipe, for an objective that is composed of them
    mixed: tuple[Tensor, Tensor] | None = None  # labels (B,) of the images mixed into x, and the weights (B,) of y
    ramp: float = 1.0  # how much of its rise the budget has behind it at this step, between 0 and 1
    notes: dict[str, Tensor] = field(default_factory=dict)  # (B,) each, from one part to another; means in the history
    examples: dict[str, Tensor] = field(default_factory=dict)  # (B,) each, for the log: see `describe_examples`

    @property
    def threat(self) -> Threat:
        """The threat at the budget scheduled for this step."""
        if self.adversary is None:
            raise InputError('threat: missing; this objective needs one, such as threat = "linf:0.1"')
        return self.adversary


def in_bfloat16(x: Tensor, precision: Precision) -> AbstractContextManager[Any]:
    """Passes inside are in bfloat16 (autocast) if the precision says so, else as the model is."""
    return nullcontext() if precision == "full" else torch.autocast(x.device.type, torch.bfloat16)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Every module in training or in eval mode inside; afterwards each one as it came."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
