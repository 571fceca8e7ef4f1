"""The set of inputs that a linear bound is evaluated over."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.bounding.core.placements import boxes
from holdfast.bounding.core.rounding import gamma, norm_underflow, underflow, unit
from holdfast.bounding.fast import fused
from holdfast.bounding.linear.coefficients import Coefficients, clean, dot, seen
from holdfast.threats import L1, L2, Linf, Sparse, Threat

BALLS = ("linf", "l2", "l1")
"""Threats that are a ball of one radius around each input."""
REGIONS = (*BALLS, "box", "patch", "sparse")
"""Threats that linear bounds can be evaluated over."""


@dataclass(frozen=True, eq=False)
class Region:
    """A box [lower, upper] (B, *shape) of inputs, cut with the threat's own set around x if that is smaller.

    `eps` (B,), if given, holds the radius of each input's ball instead of the threat's.
    """

    lower: Tensor
    upper: Tensor
    x: Tensor
    threat: L2 | L1 | Sparse | None = None
    eps: Tensor | None = None

    def select(self, index: Tensor) -> "Region":
        """The region of some of the inputs."""
        eps = None if self.eps is None else self.eps[index]
        return replace(self, lower=self.lower[index], upper=self.upper[index], x=self.x[index], eps=eps)

    def double(self) -> "Region":
        """The same region in float64."""
        eps = None if self.eps is None else self.eps.double()
        return replace(self, lower=self.lower.double(), upper=self.upper.double(), x=self.x.double(), eps=eps)


def region(threat: Threat, x: Tensor, *, sound: bool) -> Region:
    """The threat set around x as a Region; patches are several boxes for each input, see `boxes`."""
    if isinstance(threat, Sparse):
        return Region(*threat.box(x), x, threat)
    lower, upper, _ = next(boxes(threat, x, sound=sound, chunk=1))
    return Region(lower, upper, x, threat if isinstance(threat, L2 | L1) else None)


def balls(threat: Linf | L2 | L1, x: Tensor, eps: Tensor, *, sound: bool) -> Region:
    """Balls of the threat's kind and valid range, with a radius of its own, `eps` (B,), for each input."""
    reach = eps.view(-1, *[1] * (x.ndim - 1))
    if sound:  # x -+ eps is rounded, relative to |x| + eps
        reach = reach + 4 * unit(x.dtype) * (max(abs(threat.low), abs(threat.high)) + reach)
    lower, upper = (x - reach).clamp(min=threat.low), (x + reach).clamp(max=threat.high)
    return Region(lower, upper, x, None if isinstance(threat, Linf) else threat, eps)


def minimum(region: Region, c: Coefficients, *, sound: bool, scratch: bool = False) -> Tensor:
    """Lower bound of <c, x'> over the region for every row (see `Coefficients.rows`); exact on boxes and for `Sparse`.

    For balls it is the better of the ball's own minimum, <c, x> - eps |c|_dual, and the box's. With p the
    positive part of c, the minimum over a box is <c, upper> - <p, upper - lower>, and <|c|, v> = 2 <p, v> - <c, v>.

    Args:
        region: the inputs.
        c: coefficients of the input.
        sound: account for rounding.
        scratch: the coefficients are not needed any more and may be overwritten if nobody else holds them.
    """
    c = clean(c, tuple(region.x.shape[1:]))
    plain = region.threat is None and not (region.lower.requires_grad or region.upper.requires_grad)
    dense = c.window is None and len(c.values) == len(region.x)
    if fused.wanted(sound) and plain and dense:
        return fused.box_minimum(c.values, region.lower, region.upper)
    value = dot(c.values, c, region.upper)
    if region.threat is not None:
        ball = dot(c.values, c, region.x) - _reach(region, region.threat, c, sound=sound)
    terms = 2 * c.values[(0,) * len(c.rows)].numel()
    if sound:
        largest = torch.maximum(region.lower.abs(), region.upper.abs())
        error = -dot(c.values, c, largest)
    overwrite = scratch and c.scratch and not torch.is_grad_enabled()
    positive = c.values.clamp_(min=0) if overwrite else c.values.clamp(min=0)
    value = value - dot(positive, c, region.upper - region.lower)
    if region.threat is not None:
        value = torch.maximum(value, ball)
    if not sound:
        return value
    error = error + 2 * dot(positive, c, largest)
    return value - (8 * gamma(terms, value.dtype) * error + underflow(terms, value.dtype))


def _reach(region: Region, threat: L2 | L1 | Sparse, c: Coefficients, *, sound: bool) -> Tensor:
    """Largest decrease of <c, x'> from <c, x> within the threat set for every row; balls ignore the valid range."""
    axes = len(c.rows)
    if isinstance(threat, L1 | L2):
        eps = threat.eps if region.eps is None else region.eps.view(-1, *[1] * (axes - 1))
        order = torch.inf if isinstance(threat, L1) else 2
        norm: Tensor = torch.linalg.vector_norm(c.values.flatten(axes), order, dim=axes)
        return eps * (norm + norm_underflow(c.values[(0,) * axes].numel(), norm.dtype) if sound else norm)
    down, up = seen(region.lower - region.x, c) * c.values, seen(region.upper - region.x, c) * c.values
    least = torch.minimum(down, up)
    gain = Sparse.per_pixel(-least.flatten(0, axes - 1))
    return gain.topk(min(threat.k, gain.shape[1]), dim=1).values.sum(1).view(least.shape[:axes])
