"""Embedding a watermark that survives noise on the weights, and with it a certificate.

Each epoch, after a warm-up, the trigger set is learnt at weights with noise on them:

    g = 1/(k t) sum_{i=1..k} sum_{j=1..t} grad loss(triggers; theta + G_ij),   G_ij ~ N(0, (i s / k)^2 I)

(Bansal et al., "Certified neural network watermarks with randomized smoothing", 2022). The rest is ordinary training on
the data with the triggers mixed in. With s = 0 nothing but that is left: the usual backdoor watermark, the baseline.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from holdfast.apps.watermark.triggers import TriggerSet
from holdfast.checks import check_labels, check_logits
from holdfast.errors import InputError
from holdfast.utils.options import Count, Epochs, Fraction, NotNegative, Positive, check_fields
from holdfast.utils.progress import progress_bars


@dataclass(frozen=True)
class EmbedOptions:
    """How to embed; the defaults are the published ones, for ResNet-18 with its 11 million weights.

    Attributes:
        noise: s, the largest standard deviation of the noise on the weights; 0 is the baseline. At what the certificate
            is to use, or a little above.
        levels: k, noise levels s/k, 2s/k, ..., s.  samples: t, draws at each level.
        step_per_level: one step of the optimiser for each level, not one for all of them.
        warm_up: epochs of ordinary training at first.
        epochs, lr, momentum, weight_decay, batch_size: settings of SGD; the same for data and triggers.
        drop_every: epochs after which lr is divided by 10.
        trigger_batch: triggers for each step on noisy weights.
        clip_norm: largest norm of a gradient. Small networks diverge under noise without it.
    """

    noise: NotNegative = 1.0
    levels: Count = 20
    samples: Count = 100
    step_per_level: bool = False
    warm_up: Epochs = 5
    epochs: Count = 100
    lr: Positive = 0.05
    momentum: Fraction = 0.9
    weight_decay: NotNegative = 1e-4
    batch_size: Count = 256
    drop_every: Count = 30
    trigger_batch: Count = 64
    clip_norm: Positive = math.inf

    def __post_init__(self) -> None:
        check_fields(self)


def embed(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    triggers: TriggerSet,
    options: EmbedOptions = EmbedOptions(),  # noqa: B008  (frozen)
    *,
    seed: int = 0,
    show: bool = False,
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """A marked copy of the model, in eval mode, and one row of figures for each epoch; `model` stays as it is.

    Args:
        model: new, or trained already.
        x: training inputs in [0, 1], shape (N, ...).  y: labels, shape (N,).
        triggers: what to embed, on the device of x.
        seed: fixes the order of the data and the noise.
    """
    model = copy.deepcopy(model).train()
    check_trainable(model, x, y, triggers)
    all_x, all_y = torch.cat([x, triggers.x.to(x)]), torch.cat([y, triggers.y.to(y)])
    optimizer = torch.optim.SGD(
        model.parameters(), options.lr, momentum=options.momentum, weight_decay=options.weight_decay
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, options.drop_every, 0.1)
    generator, history = torch.Generator().manual_seed(seed), []
    with progress(show, "embed", options.epochs) as advance:
        for epoch in range(options.epochs):
            noisy = 0.0
            if options.noise > 0 and epoch >= options.warm_up:
                noisy = _trigger_epoch(model, triggers, optimizer, options, generator)
            total, right = 0.0, 0
            for rows in torch.randperm(len(all_x), generator=generator).to(x.device).split(options.batch_size):
                logits = model(all_x[rows])
                loss = cross_entropy(logits, all_y[rows])
                optimizer.zero_grad()
                loss.backward()
                _step(model, optimizer, options.clip_norm)
                total += float(loss.detach()) * len(rows)
                right += int((logits.argmax(1) == all_y[rows]).sum())
            if not math.isfinite(total):
                raise InputError(f"the loss is not finite in epoch {epoch + 1}; take a smaller lr or clip_norm")
            schedule.step()
            figures = {"loss": total / len(all_x), "accuracy": right / len(all_x), "noisy_trigger_loss": noisy}
            history.append({"epoch": epoch + 1, **figures})
            advance(f"loss {figures['loss']:.3f}, triggers under noise {noisy:.3f}")
    model.zero_grad()
    return model.eval(), history


def noisy_weights(model: nn.Module, sigma: float, generator: torch.Generator) -> dict[str, Tensor]:
    """theta + G by name, G ~ N(0, sigma^2 I); the weights themselves are not touched, so nothing need be restored.

    Gradients flow to theta. Drawn on the CPU, so that a seed means the same noise on every device.
    """
    named = model.named_parameters()
    return {
        name: p + sigma * torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) for name, p in named
    }


def noisy_loss(
    model: nn.Module, x: Tensor, y: Tensor, sigmas: Sequence[float], samples: int, generator: torch.Generator
) -> float:
    """Add the gradient of the mean loss over all levels and draws to `.grad` of the weights; return the loss.

    The model must be in eval mode, in which batch norm neither takes nor changes statistics. Draws are made one after
    another: batched over draws (`torch.func.vmap`) they take the same time on a CPU, and more memory.
    """
    total, share = 0.0, 1 / (len(sigmas) * samples)
    for sigma in sigmas:
        for _ in range(samples):
            logits = functional_call(model, noisy_weights(model, sigma, generator), (x,))
            loss = share * cross_entropy(logits, y)
            loss.backward()
            total += float(loss.detach())
    return total


def check_trainable(model: nn.Module, x: Tensor, y: Tensor, triggers: TriggerSet) -> None:
    """Refuse a model without weights, data that do not fit, and triggers of another shape or with other classes."""
    if next(model.parameters(), None) is None:
        raise InputError("the model has no parameters: there is nothing to put a watermark into")
    if x.shape[1:] != triggers.x.shape[1:]:
        raise InputError(f"inputs have shape {tuple(x.shape[1:])}, triggers {tuple(triggers.x.shape[1:])}")
    # A copy: a forward pass in training mode changes the statistics of batch norm.
    logits = check_logits(copy.deepcopy(model).eval(), x[:2])
    check_labels(y, len(x), logits.shape[1])
    check_labels(triggers.y, len(triggers), logits.shape[1])


@contextmanager
def progress(show: bool, text: str, total: int) -> Iterator[Any]:
    """A bar on the terminal; gives a function that advances it by one, with a few words."""
    with progress_bars(show) as bars:
        bar = bars.add_task(text, total=total)
        yield lambda words="": bars.update(bar, advance=1, description=f"{text} {words}")


def _trigger_epoch(
    model: nn.Module,
    triggers: TriggerSet,
    optimizer: torch.optim.Optimizer,
    options: EmbedOptions,
    generator: torch.Generator,
) -> float:
    """One pass over the triggers on noisy weights, with batch norm frozen; returns the mean loss."""
    sigmas = [options.noise * i / options.levels for i in range(1, options.levels + 1)]
    groups = [[sigma] for sigma in sigmas] if options.step_per_level else [sigmas]
    total = 0.0
    model.eval()
    for rows in torch.randperm(len(triggers), generator=generator).to(triggers.y.device).split(options.trigger_batch):
        for group in groups:
            optimizer.zero_grad()
            loss = noisy_loss(model, triggers.x[rows], triggers.y[rows], group, options.samples, generator)
            _step(model, optimizer, options.clip_norm)
            total += loss * len(rows) / (len(triggers) * len(groups))
    model.train()
    return total


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
    if clip_norm < math.inf:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
