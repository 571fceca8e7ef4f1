"""How smooth is a training loss where training is? Its range and the turn of its gradient along one gradient step.

Tight bounds do not always train better: a loss whose gradient turns at every step cannot be followed (Lee et al.,
"Towards better understanding of training certifiably robust models against adversarial examples", 2021). With L the
loss on one batch, g its gradient and theta' = theta - lr g:

loss variation       range of L(theta - lambda lr g) over lambda in [0, 5]
gradient difference  |g(theta) - g(theta')|, also divided by sqrt(P), P the number of weights
cosine distance      1 - cos(g(theta), g(theta'))

While the budget rises, training follows d = grad L_now and cares for L_target, the loss at the full budget. If the step
is right, L_target shrinks by a factor of 1 - (mu / 2) cos(phi)^2 / |H u| or more, phi the angle between d and
grad L_target, H the Hessian of L_target, u = d / |d|. `target_alignment` measures cos(phi) and |H u|.

A loss is any function `loss(model, x, y)` that returns a scalar: cross-entropy, or a loss of bounds. If it draws random
numbers (a start, lower slopes), give it a `Noise` of fixed seed: all measures compare losses at different weights. The
model is copied and never touched, so the loss must use the model that it is given and no other.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from holdfast.errors import InputError

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""From a model, inputs (B, ...) and labels (B,) to a scalar with a gradient for the model's parameters."""

FACTORS = tuple(sorted([0.0, 1.0, *(0.5 * 10 ** (i / 9) for i in range(10))]))
"""Lengths of the probing steps, in steps of training: none, one, and ten from 0.5 to 5 at equal ratios."""


@dataclass(frozen=True)
class LossVariation:
    """The loss along the gradient: values[i] = L(theta - factors[i] lr g)."""

    factors: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def low(self) -> float:
        """Smallest value; NaN if one of them is."""
        return float(np.min(self.values))

    @property
    def high(self) -> float:
        """Largest value; NaN if one of them is."""
        return float(np.max(self.values))


@dataclass(frozen=True)
class GradientChange:
    """From one place to another.

    Attributes:
        difference: l2 norm of the difference.
        rms: root of the mean square of its entries, difference / sqrt(P); compares networks of different sizes.
        cosine_distance: 1 - cos of the angle, in [0, 2]; NaN if a gradient is zero and has no direction.
    """

    difference: float
    rms: float
    cosine_distance: float


@dataclass(frozen=True)
class TargetAlignment:
    """What a step on one loss does to another, the target.

    Attributes:
        cosine: cos(phi) of the angle between both gradients; NaN if one of them is zero.
        difference: l2 norm of the change of the target's gradient along a plain step on the loss of now.
        rms: difference / sqrt(P).
        curvature: difference / length of the step, which is |H u| for a short one; NaN if there was no step.
    """

    cosine: float
    difference: float
    rms: float
    curvature: float


def weights(model: nn.Module) -> Tensor:
    """The trainable parameters as one vector, (P,); a copy, which later steps do not change."""
    return parameters_to_vector(_trainable(model)).detach().clone()


def loss_variation(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, lr: float, factors: Sequence[float] = FACTORS
) -> LossVariation:
    """Values of the loss at several lengths of the gradient step.

    (Santurkar et al., "How does batch normalization help optimization?", 2018.) The direction is that of the plain
    gradient, whatever the optimiser is.

    Args:
        model: in the mode in which it is trained.
        loss: see the top of this file.
        lr: learning rate of now.
        factors: multiples of lr; 0 for the loss as it is.
    """
    _check_lr(lr)
    if not factors:
        raise InputError("factors must hold at least one number")
    probe, theta = _Probe(model, x, y), weights(model)
    g = probe.gradient(loss, theta)
    values = tuple(float(probe.value(loss, theta - factor * lr * g).detach()) for factor in factors)
    return LossVariation(tuple(factors), values)


def gradient_change(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, lr: float) -> GradientChange:
    """Change of the gradient along one plain gradient step, on the same batch; arguments as for `loss_variation`."""
    _check_lr(lr)
    probe, theta = _Probe(model, x, y), weights(model)
    g = probe.gradient(loss, theta)
    return _change(g, probe.gradient(loss, theta - lr * g))


def gradient_change_between(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, before: Tensor, after: Tensor
) -> GradientChange:
    """Change of the gradient between two places, such as before and after a step of the optimiser.

    Args:
        model, loss, x, y: as for `loss_variation`.  before, after: what `weights` gave at either time, (P,).
    """
    probe = _Probe(model, x, y)
    return _change(probe.gradient(loss, before), probe.gradient(loss, after))


def target_alignment(
    model: nn.Module, loss_now: Loss, loss_target: Loss, x: Tensor, y: Tensor, *, lr: float
) -> TargetAlignment:
    """Does a step on the loss at the budget of now serve the loss at the full budget?

    cos(phi) = <grad L_target, grad L_now> / (|grad L_target| |grad L_now|); the numerator is sometimes printed with
    L_now twice, which says nothing of the target.

    Args:
        model, x, y, lr: as for `loss_variation`.
        loss_now: what training minimises at this step.  loss_target: what it is to minimise in the end.
    """
    _check_lr(lr)
    probe, theta = _Probe(model, x, y), weights(model)
    d, g = probe.gradient(loss_now, theta), probe.gradient(loss_target, theta)
    change = _change(g, probe.gradient(loss_target, theta - lr * d))
    length = lr * float(d.double().norm())
    curvature = change.difference / length if length > 0 else math.nan
    return TargetAlignment(1 - _cosine_distance(d, g), change.difference, change.rms, curvature)


def record(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, step: float, lr: float, target: Loss | None = None
) -> dict[str, float]:
    """One row of all measures, to be called every so many steps on a batch of training data.

    Keys: step, loss, loss_low, loss_high, gradient_difference, gradient_rms, cosine_distance; with a target also
    target_cosine, target_difference, target_rms, target_curvature. `charts.smoothness_svg` draws the rows of runs.

    Args:
        model, loss, x, y, lr: as for `loss_variation`.
        step: step or epoch of training.  target: the loss at the full budget.
    """
    variation = loss_variation(model, loss, x, y, lr=lr)
    change = gradient_change(model, loss, x, y, lr=lr)
    row = {
        "step": step,
        "loss": variation.values[0],
        "loss_low": variation.low,
        "loss_high": variation.high,
        "gradient_difference": change.difference,
        "gradient_rms": change.rms,
        "cosine_distance": change.cosine_distance,
    }
    if target is not None:
        found = target_alignment(model, loss, target, x, y, lr=lr)
        row |= {f"target_{key}": value for key, value in vars(found).items()}
    return row


class _Probe:
    """A copy of a model whose loss is asked at many weights.

    Every answer starts from the same buffers and the same state of torch's generators (dropout), so that answers differ
    only by the weights, and the random numbers of the training around stay as they are.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.model, self.x, self.y = copy.deepcopy(model), x, y
        self.parameters = _trainable(self.model)
        self.size = sum(p.numel() for p in self.parameters)
        self.buffers = [(b, b.clone()) for b in self.model.buffers()]

    def value(self, loss: Loss, theta: Tensor) -> Tensor:
        """The loss with its graph, a scalar; theta: (P,)."""
        if theta.shape != (self.size,):
            raise InputError(f"weights must have shape ({self.size},), as `weights` gives, got {tuple(theta.shape)}")
        vector_to_parameters(theta.detach(), self.parameters)
        for buffer, start in self.buffers:
            buffer.copy_(start)
        devices = [self.x.device] if self.x.device.type == "cuda" else []
        with torch.enable_grad(), torch.random.fork_rng(devices):
            return loss(self.model, self.x, self.y)

    def gradient(self, loss: Loss, theta: Tensor) -> Tensor:
        """Of the loss for the weights, (P,)."""
        return flat_gradient(self.value(loss, theta), self.parameters)


def flat_gradient(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Gradient of a scalar for the parameters, (P,); an error if it depends on none of them."""
    if value.ndim != 0:
        raise InputError(f"the loss must be a scalar, got shape {tuple(value.shape)}; take its mean")
    parts: Sequence[Tensor | None] = [None] * len(parameters)
    if value.requires_grad:
        parts = torch.autograd.grad(value, parameters, allow_unused=True)
    if all(part is None for part in parts):
        raise InputError("the loss does not depend on the model that it is given; does it use another one?")
    pairs = zip(parts, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if part is None else part).flatten() for part, p in pairs])


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    found = [p for p in model.parameters() if p.requires_grad]
    if not found:
        raise InputError("the model has no trainable parameters to take a gradient for")
    return found


def _change(g: Tensor, later: Tensor) -> GradientChange:
    difference = float((g.double() - later.double()).norm())
    return GradientChange(difference, difference / math.sqrt(len(g)), _cosine_distance(g, later))


def _cosine_distance(a: Tensor, b: Tensor) -> float:
    """1 - cos = |a / |a| - b / |b||^2 / 2, which does not cancel where the angle is small."""
    a, b = a.double(), b.double()
    return float((a / a.norm() - b / b.norm()).square().sum() / 2)


def _check_lr(lr: float) -> None:
    if not (lr > 0 and math.isfinite(lr)):
        raise InputError(f"lr must be positive and finite, got {lr}")
