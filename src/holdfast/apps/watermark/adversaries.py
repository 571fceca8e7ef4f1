"""Attacks on a watermark: fine-tuning and distillation, and the worst change of the weights within a ball.

Each works on a copy; the owner's model stays as it is. `watch` is shown the model after each epoch.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.apps.watermark.embedding import noisy_loss
from holdfast.errors import InputError

Targets = Literal["true", "hard", "soft"]
Watch = Callable[[nn.Module], None]
Change = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, inputs, labels) -> other inputs to train on."""


class Tuning(TypedDict):
    """Options that all attacks by training take."""

    epochs: int
    lr: float
    seed: int
    watch: Watch


_BATCH = 1024  # inputs for each forward pass without gradients


@dataclass(frozen=True)
class Drift:
    """l2 distances of all parameters and of all float buffers from another model of the same architecture."""

    parameters: float
    buffers: float


def drift(model: nn.Module, original: nn.Module) -> Drift:
    """How far the weights have moved, in double precision; buffers apart, since the certificate does not cover them."""
    return Drift(
        _distance(dict(model.named_parameters()), dict(original.named_parameters())),
        _distance(dict(model.named_buffers()), dict(original.named_buffers())),
    )


def _distance(now: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    shapes = [{name: tuple(value.shape) for name, value in each.items()} for each in (now, before)]
    if shapes[0] != shapes[1]:
        name = next(key for key in shapes[0] | shapes[1] if shapes[0].get(key) != shapes[1].get(key))
        raise InputError(
            f"the models must be of one architecture: '{name}' has shape {shapes[0].get(name)} in one and "
            f"{shapes[1].get(name)} in the other"
        )
    pairs = ((now[name].detach().double(), before[name].detach().double()) for name in now)
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))


def fine_tune(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None = None,
    *,
    targets: Targets = "true",
    lr: float = 1e-3,
    epochs: int = 50,
    batch_size: int = 256,
    weight_decay: float = 0.0,
    decay_epochs: int = 10,
    seed: int = 0,
    watch: Watch | None = None,
    watch_steps: Watch | None = None,
) -> nn.Module:
    """The stolen model, trained on with Adam on the attacker's data; in eval mode.

    Args:
        model: stolen.
        x: the attacker's inputs, shape (N, ...).  y: their labels, (N,); distillation needs none.
        targets: "true" labels; "hard", the classes that the stolen model answers; "soft", its probabilities.
        weight_decay: for the first `decay_epochs`, then 0: moves the weights away, then lets the accuracy recover.
    """
    if targets not in ("true", "hard", "soft"):
        raise InputError(f"targets must be 'true', 'hard' or 'soft', got '{targets}'")
    if targets == "true" and y is None:
        raise InputError("targets='true' needs labels y; 'hard' and 'soft' ask the stolen model")
    stolen = copy.deepcopy(model).eval().requires_grad_(True)
    if targets == "true":
        labels = y
    else:
        with torch.no_grad():
            logits = torch.cat([stolen(part) for part in x.split(_BATCH)])
        labels = logits.softmax(1) if targets == "soft" else logits.argmax(1)
    assert labels is not None
    run = partial(train_on, stolen, x, labels, lr=lr, epochs=epochs, batch_size=batch_size, seed=seed, watch=watch)
    return run(weight_decay=weight_decay, decay_epochs=decay_epochs, watch_steps=watch_steps)


def epochs_to_leave(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None,
    radii: Sequence[float],
    *,
    targets: Targets = "true",
    lr: float = 1e-4,
    epochs: int = 1,
    batch_size: int = 256,
    seed: int = 0,
) -> tuple[float | None, ...]:
    """Epochs of `fine_tune` after which the weights are at least each of the `radii` (l2) away from the model's.

    A fraction, counted in steps; None for a radius that was not left within `epochs`. A certificate says nothing of the
    model from there on. Each step of Adam with a constant gradient moves d weights by lr sqrt(d).
    """
    if not radii or any(not math.isfinite(radius) or radius < 0 for radius in radii):
        raise InputError(f"radii must be finite numbers, 0 or more, at least one, got {list(radii)}")
    moved: list[float] = []
    fine_tune(
        model,
        x,
        y,
        targets=targets,
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        watch_steps=lambda now: moved.append(drift(now, model).parameters),
    )
    steps = -(-len(x) // batch_size)
    left = (next((i for i, far in enumerate(moved, 1) if far >= radius), None) for radius in radii)
    return tuple(None if step is None else step / steps for step in left)


def train_on(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    *,
    lr: float,
    epochs: int,
    batch_size: int = 256,
    seed: int = 0,
    weight_decay: float = 0.0,
    decay_epochs: int = 0,
    layer: nn.Module | None = None,
    change: Change | None = None,
    watch: Watch | None = None,
    watch_steps: Watch | None = None,
) -> nn.Module:
    """Train `model` itself with Adam, and return it in eval mode.

    Args:
        model: changed in place.
        x: inputs (N, ...).  targets: classes (N,) or probabilities (N, K).
        layer: train only this layer, with batch norm frozen.
        change: turns the inputs of each batch into others, with the model in eval mode.
        watch, watch_steps: shown the model after each epoch, and after each step.
    """
    if len(x) == 0 or len(x) != len(targets):
        raise InputError(f"there must be inputs and one target for each, got {len(x)} and {len(targets)}")
    if lr < 0 or epochs < 0 or batch_size < 1 or weight_decay < 0:
        raise InputError(
            "lr, epochs and weight_decay must be 0 or more and batch_size at least 1, "
            f"got lr={lr}, epochs={epochs}, weight_decay={weight_decay}, batch_size={batch_size}"
        )
    trained = model if layer is None else layer
    optimizer = torch.optim.Adam(trained.parameters(), lr, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        if epoch == decay_epochs:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        for rows in torch.randperm(len(x), generator=generator).to(x.device).split(batch_size):
            inputs = x[rows] if change is None else change(model.eval(), x[rows], targets[rows])
            model.train(layer is None)
            loss = cross_entropy(model(inputs), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if watch_steps is not None:
                watch_steps(model)
        model.eval()
        if watch is not None:
            watch(model)
    model.zero_grad()
    return model.eval()


def parameter_pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    radius: float,
    *,
    steps: int = 40,
    sigma: float = 0.0,
    samples: int = 1,
    seed: int = 0,
) -> nn.Module:
    """A copy whose weights have moved by at most `radius` (l2) to where the loss on (x, y) is as large as was found.

    Gradient ascent with steps of length 2.5 radius / steps along the gradient, projected to the ball; the best iterate
    is kept. With the triggers for (x, y) it attacks the watermark, with test data it shows which radius leaves a model
    of use. With sigma > 0 the loss is the mean over `samples` noisy copies of the weights, fresh in each step: the
    attack on the median accuracy that is certified.

    Args:
        model: in any mode; evaluated in eval mode, with its buffers as they are.
    """
    if not (0 <= radius < math.inf and steps >= 1 and sigma >= 0 and samples >= 1):
        raise InputError(
            "radius and sigma must be 0 or more, steps and samples at least 1, "
            f"got radius={radius}, sigma={sigma}, steps={steps}, samples={samples}"
        )
    model = copy.deepcopy(model).eval().requires_grad_(True)
    weights, generator = list(model.parameters()), torch.Generator().manual_seed(seed)
    if not weights:
        raise InputError("the model has no parameters to move")
    start = [p.detach().clone() for p in weights]
    delta, best, worst = [torch.zeros_like(p) for p in start], start, -math.inf
    for step in range(steps + 1):
        model.zero_grad()
        loss = noisy_loss(model, x, y, [sigma], samples, generator)
        if loss > worst:  # NaN never is
            best, worst = [p.detach().clone() for p in weights], loss
        if step == steps:
            break
        ascent = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
        delta = _project([d + 2.5 * radius / steps * g for d, g in zip(delta, _unit(ascent), strict=True)], radius)
        with torch.no_grad():
            for p, p0, d in zip(weights, start, delta, strict=True):
                p.copy_(p0 + d)
    with torch.no_grad():
        for p, value in zip(weights, best, strict=True):
            p.copy_(value)
    model.zero_grad()
    return model


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _unit(tensors: list[Tensor]) -> list[Tensor]:
    norm = _norm(tensors)
    return [t / norm for t in tensors] if norm > 0 else tensors


def _project(delta: list[Tensor], radius: float) -> list[Tensor]:
    """To the ball, and a little further in: what rounding adds in theta + delta must not leave it."""
    inner = radius * (1 - 1e-5)
    norm = _norm(delta)
    return [d * (inner / norm) for d in delta] if norm > inner else delta
