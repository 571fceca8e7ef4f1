"""Straight lines above and below an activation on an interval.

For every activation any slope may be chosen; the intercept that makes the line sound is then computed from the slope,
so that a clumsy slope costs tightness and never soundness.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from holdfast.bounding.core.rounding import unit
from holdfast.bounding.graph import ops
from holdfast.errors import UnsupportedError, argument

Slopes = Literal["adaptive", "parallel"]
"""adaptive: two slopes as in CROWN. parallel: one slope for both lines as in Fast-Lin and the Wong-Kolter dual."""

PIECEWISE = {"relu", "leaky_relu"}
S_SHAPED = {"sigmoid", "tanh", "arctan"}


@dataclass(frozen=True, eq=False)
class Lines:
    """lower_slope z + lower_shift <= activation(z) <= upper_slope z + upper_shift for l <= z <= u; all (B, *shape)."""

    lower_slope: Tensor
    lower_shift: Tensor | None
    upper_slope: Tensor
    upper_shift: Tensor


def relax(op: ops.Activation, lower: Tensor, upper: Tensor, slopes: Slopes, name: str) -> Lines:
    """Lines for an activation whose input lies in [lower, upper]."""
    if op.kind in PIECEWISE:
        return _piecewise(op.parameter, lower, upper, slopes)
    if op.kind in S_SHAPED:
        return _s_shaped(op.kind, lower, upper, slopes)
    raise UnsupportedError(
        f"layer '{name}': linear bounds have no relaxation for the activation '{op.kind}'; "
        f"they cover {', '.join(sorted(PIECEWISE | S_SHAPED))}. Use {argument('method', 'ibp')}, which covers all "
        "monotone ones."
    )


def unstable(op: ops.Op, lower: Tensor, upper: Tensor) -> Tensor:
    """Where the activation is not linear on [lower, upper], bool (B, *shape): only there do tighter bounds matter."""
    if isinstance(op, ops.Activation) and op.kind in PIECEWISE:
        return (lower < 0) & (upper > 0)
    return upper > lower


def chord(slope: float, lower: Tensor, upper: Tensor) -> Tensor:
    """Slope of the chord of leaky ReLU: 1 where l >= 0, `slope` where u <= 0."""
    up, down = upper.clamp(min=0), lower.clamp(max=0)
    mixed = (lower < 0) & (upper > 0)
    # No division by zero in the branch that is not taken: its gradient would be NaN.
    width = torch.where(mixed, up - down, torch.ones_like(up)).clamp(min=1e-12)
    stable = torch.where(upper <= 0, torch.full_like(up, slope), torch.ones_like(up))
    return torch.where(mixed, (up - slope * down) / width, stable).clamp(slope, 1.0)


def _piecewise(slope: float, lower: Tensor, upper: Tensor, slopes: Slopes) -> Lines:
    """max(z, slope z). The upper line is the chord; the lower one passes through 0 with any slope in [slope, 1]."""
    up = chord(slope, lower, upper)
    if slopes == "parallel":
        low = up
    else:  # the slope with the smaller area between the lines
        low = torch.where(upper > -lower, torch.ones_like(up), torch.full_like(up, slope))
        low = torch.where(lower >= 0, torch.ones_like(low), torch.where(upper <= 0, torch.full_like(low, slope), low))
    return Lines(low, None, up, upper_shift(slope, up, lower, upper))


def upper_shift(slope: float, up: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Smallest intercept for the slope `up`: the gap is largest at an end, where it is (slope - up) l or (1 - up) u.

    Enlarged by the rounding of these products; zero where the unit is stable.
    """
    shift = torch.maximum((up - slope) * -lower.clamp(max=0), (1 - up) * upper.clamp(min=0))
    return shift * (1 + 8 * unit(lower.dtype))


_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # function, derivative, and the t >= 0 at which the derivative is d
    "sigmoid": (
        torch.sigmoid,
        lambda z: torch.sigmoid(z) * torch.sigmoid(-z),
        lambda d: ((1 - 2 * d + (1 - 4 * d).clamp(min=0).sqrt()) / (2 * d)).log(),
    ),
    "tanh": (
        torch.tanh,
        lambda z: 1 - torch.tanh(z).square(),
        lambda d: ((2 - d + 2 * (1 - d).clamp(min=0).sqrt()) / d).log() / 2,
    ),
    "arctan": (
        torch.atan,
        lambda z: 1 / (1 + z.square()),
        lambda d: (1 / d - 1).clamp(min=0).sqrt(),
    ),
}


def derivative_range(op: ops.Activation, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest derivative of an activation on [lower, upper], up to rounding; for choices, not for proofs."""
    if op.kind in PIECEWISE:
        floor, one = torch.full_like(lower, op.parameter), torch.ones_like(lower)
        return torch.where(lower >= 0, one, floor), torch.where(upper <= 0, floor, one)
    derivative = _FUNCTIONS[op.kind][1]
    low, high = derivative(lower), derivative(upper)
    top = torch.where((lower < 0) & (upper > 0), derivative(torch.zeros_like(low)), torch.maximum(low, high))
    return torch.minimum(low, high), top


def _s_shaped(kind: str, lower: Tensor, upper: Tensor, slopes: Slopes) -> Lines:
    """Convex left of 0, concave right of it."""
    function, derivative, _ = _FUNCTIONS[kind]
    width = upper - lower
    secant = torch.where(
        width > 1e-6,
        (function(upper) - function(lower)) / width.clamp(min=1e-6),
        torch.minimum(derivative(lower), derivative(upper)),
    )
    if slopes == "parallel":
        up = low = secant
    else:
        middle = derivative((lower + upper) / 2)
        up = torch.where(lower >= 0, middle, secant)
        low = torch.where(upper <= 0, middle, secant)
        mixed = (lower < 0) & (upper > 0)
        up = torch.where(mixed, _tangent(function, derivative, lower, upper), up)
        low = torch.where(mixed, _tangent(_mirror(function), derivative, -upper, -lower), low)
    return curved_lines(kind, low, up, lower, upper)


def slope_range(kind: str, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest derivative of an S-shaped function on [l, u]."""
    derivative = _FUNCTIONS[kind][1]
    nearest = torch.minimum(torch.maximum(torch.zeros_like(lower), lower), upper)
    return torch.minimum(derivative(lower), derivative(upper)), derivative(nearest)


def curved_lines(kind: str, low: Tensor, up: Tensor, lower: Tensor, upper: Tensor) -> Lines:
    """Lines of the given slopes below and above an S-shaped function on [l, u]."""
    function, _, where_slope = _FUNCTIONS[kind]
    return Lines(
        low,
        -_shift(_mirror(function), where_slope, low, -upper, -lower),
        up,
        _shift(function, where_slope, up, lower, upper),
    )


def _mirror(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """-f(-z): turns lower lines into upper ones."""
    return lambda z: -function(-z)


def _tangent(
    function: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor], lower: Tensor, upper: Tensor
) -> Tensor:
    """Slope of the line through (l, f(l)) that touches f at some t in [0, u], or of the chord if it would touch beyond.

    By bisection on f'(t) (t - l) = f(t) - f(l).
    """
    left, right = torch.zeros_like(lower), upper.clamp(min=0)
    for _ in range(30):
        t = (left + right) / 2
        beyond = derivative(t) * (t - lower) < function(t) - function(lower)
        left, right = torch.where(beyond, left, t), torch.where(beyond, t, right)
    t = right
    return (function(t) - function(lower)) / (t - lower).clamp(min=1e-6)


def _shift(
    function: Callable[[Tensor], Tensor],
    where_slope: Callable[[Tensor], Tensor],
    slope: Tensor,
    lower: Tensor,
    upper: Tensor,
) -> Tensor:
    """Largest f(z) - slope z on [l, u]: at an end, or at the t > 0 where f' equals the slope."""
    # The gap is stationary in t, so that t counts as a constant for gradients (its own can be infinite).
    # A slope that underflowed stands for a t beyond all floats; with the smallest normal one t is far in saturation.
    t = where_slope(slope.detach().clamp(min=torch.finfo(slope.dtype).tiny)).clamp(min=0)
    candidates = [lower, upper, torch.minimum(torch.maximum(t, lower), upper)]
    gaps = torch.stack([function(z) - slope * z for z in candidates])
    size = torch.stack([function(z).abs() + (slope * z).abs() for z in candidates])
    return gaps.amax(0) + 32 * unit(lower.dtype) * size.amax(0)
