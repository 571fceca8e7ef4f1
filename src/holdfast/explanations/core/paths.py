"""The average gradient along straight paths, by quadrature, with as many steps as completeness asks for."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import input_gradient
from holdfast.errors import InputError
from holdfast.explanations.core.answers import finite
from holdfast.explanations.core.quantity import Setting, pieces, value, values_at
from holdfast.utils.clock import check_time

Rule = Literal["left", "right", "middle", "trapezoid", "gauss-legendre"]


@dataclass(frozen=True, eq=False)
class Integral:
    """The average gradient along the path of each input.

    Attributes:
        slope: integral of the gradient at b + t (x - b) over t in [0, 1], shape of x.
        error: (B,) completeness error; see `completeness_error`.
        gradients: (B,) int64, gradient evaluations.
    """

    slope: Tensor
    error: Tensor
    gradients: Tensor


def nodes_and_weights(rule: Rule, steps: int) -> tuple[Tensor, Tensor]:
    """Places t in [0, 1] and weights of a quadrature rule, (steps,) each, float64; the weights add up to one.

    Captum's trapezoid divides by `steps` where there are steps - 1 intervals; its weights add up to 1 - 1 / steps.
    """
    if rule == "trapezoid" and steps < 2:
        raise InputError(f"the rule 'trapezoid' needs at least 2 steps, got {steps}")
    if rule == "gauss-legendre":
        t, w = np.polynomial.legendre.leggauss(steps)
        return torch.from_numpy((t + 1) / 2), torch.from_numpy(w / 2)
    if rule == "trapezoid":
        w_t = torch.full((steps,), 1 / (steps - 1), dtype=torch.float64)
        w_t[[0, -1]] /= 2
        return torch.linspace(0, 1, steps, dtype=torch.float64), w_t
    shift = {"left": 0.0, "middle": 0.5, "right": 1.0}[rule]
    t_s = (torch.arange(steps, dtype=torch.float64) + shift) / steps
    return t_s, torch.full((steps,), 1 / steps, dtype=torch.float64)


def completeness_error(total: Tensor, at_x: Tensor, at_b: Tensor) -> Tensor:
    """|total - (f(x) - f(b))| / |f(x) - f(b)|, (B,); a difference below 0.1 % of the values counts as that much.

    Args:
        total: (B,) sums of the attributions.
        at_x, at_b: (B,) f(x) and f(b).
    """
    change, size = at_x - at_b, torch.maximum(at_x.abs(), at_b.abs())
    least = torch.finfo(total.dtype).tiny ** 0.5
    return (total - change).abs() / torch.maximum(change.abs(), 1e-3 * size).clamp(min=least)


def average_gradient(
    model: nn.Module, x: Tensor, b: Tensor, y: Tensor, t: Tensor, weights: Tensor, setting: Setting
) -> Tensor:
    """sum_k weights_k gradient(b + t_k (x - b)), shape of x; at most `setting.chunk` points at a time.

    Raises `OutOfTime` when a deadline is over.
    """
    of, t, weights = value(setting.quantity), t.to(x), weights.to(x)
    slope = torch.zeros_like(x)
    for part, some in pieces(len(x), len(t), setting.chunk):
        check_time()
        start, t_k = b[part], t[some]
        points = start + t_k.view(-1, *[1] * x.ndim) * (x[part] - start)
        gradient, _, _ = input_gradient(model, points.flatten(0, 1), y[part].repeat(len(t_k)), of)
        slope[part] += (weights[some] @ gradient.view(len(t_k), -1)).view_as(start)
    return slope


def integrate(
    model: nn.Module,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    steps: int,
    rule: Rule,
    tolerance: float | None,
    max_steps: int,
) -> Integral:
    """The average gradient from b to x; steps are doubled where the completeness error is above the tolerance.

    On equal steps the gradients already taken are kept: the rule with twice as many intervals is the mean of the rule
    and of the midpoints. Gauss-Legendre starts anew.

    Args:
        x, b: ends of the paths, (B, ...) each.  y: classes, (B,).
        steps: points on the path at first.
        rule: where the points lie and how much each counts.
        tolerance: largest error that is accepted; None to leave the steps as they are.
        max_steps: not exceeded by doubling.
    """
    t, weights = nodes_and_weights(rule, steps)
    slope = average_gradient(model, x, b, y, t, weights, setting)
    at_x, at_b = values_at(model, x, y, setting), values_at(model, b, y, setting)
    error = completeness_error(((x - b) * slope).flatten(1).sum(1), at_x, at_b)
    gradients = torch.full_like(y, steps)
    nested, intervals = rule != "gauss-legendre", steps - 1 if rule == "trapezoid" else steps
    while tolerance is not None and 2 * intervals <= max_steps:
        # NaN compares as false: more steps would not help it.
        rows = (error > tolerance).nonzero()[:, 0]
        if len(rows) == 0:
            break
        t, weights = nodes_and_weights("middle", intervals) if nested else nodes_and_weights(rule, 2 * intervals)
        finer = average_gradient(model, x[rows], b[rows], y[rows], t, weights, setting)
        slope[rows] = (slope[rows] + finer) / 2 if nested else finer
        total = ((x[rows] - b[rows]) * slope[rows]).flatten(1).sum(1)
        error[rows] = completeness_error(total, at_x[rows], at_b[rows])
        gradients[rows] += len(t)
        intervals *= 2
    return Integral(slope, error, gradients)


def accepted(found: Integral, tolerance: float | None) -> Tensor:
    """(B,) bool: finite, and complete up to the tolerance if there is one."""
    known = finite(found.slope) & torch.isfinite(found.error)
    return known if tolerance is None else known & (found.error <= tolerance)


def check_steps(steps: int, max_steps: int) -> None:
    """Refuse fewer steps at most than at first."""
    if max_steps < steps:
        raise InputError(f"expected steps <= max_steps, got {steps} and {max_steps}")
