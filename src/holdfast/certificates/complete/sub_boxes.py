"""Linear bounds of output conditions over many boxes at once, and what they leave of each box."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.bounding.core.region import Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.interval import Interval
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import Coefficients
from holdfast.certificates.complete.problem import Conditions
from holdfast.certificates.complete.zonotope import sweep

SLACK = 1e-9
"""By which a box that is cut stays larger than the cut says, relative to its size: more than float64 rounds."""


@dataclass(frozen=True, eq=False)
class Bounded:
    """Bounds over B boxes of n inputs.

    Attributes:
        excess: (B, M) lower bounds of rows @ z - limits.
        slopes: (B, M, n) coefficients of planes below the rows: rows @ z >= <slopes, x> + a constant on the box.
        intervals: bounds of every node, (B, *shape) each.
    """

    excess: Tensor
    slopes: Tensor
    intervals: list[Interval]

    def select(self, index: Tensor) -> "Bounded":
        """The bounds of some of the boxes."""
        intervals = [(low[index], high[index]) for low, high in self.intervals]
        return Bounded(self.excess[index], self.slopes[index], intervals)


def bounded(graph: Graph, lower: Tensor, upper: Tensor, conditions: Conditions, dtype: torch.dtype) -> Bounded:
    """Bound the conditions over boxes [lower, upper] (B, n): a sweep of zonotopes, then a backward pass.

    Args:
        graph: in float64, with a rule of the sweep for every operation.
        lower: float64.  upper: float64.
        conditions: rows that are bounded.
        dtype: in which the network is run.
    """
    shape = graph.nodes[0].shape
    low, high = lower.view(-1, *shape), upper.view(-1, *shape)
    r = linear.Relaxation(graph, Region(low, high, low), True)
    sweep(r, dtype)
    rows = Coefficients(conditions.rows.expand(len(low), -1, -1))
    planes = linear.backward(r, len(graph.nodes) - 1, rows)
    values = linear.concretise(r, planes)
    return Bounded(values - conditions.limits, planes.coefficients.values.flatten(2), r.intervals)


def cut(lower: Tensor, upper: Tensor, found: Bounded, conditions: Conditions) -> tuple[Tensor, Tensor]:
    """The part of each box in which a counter-example may lie: lower and upper (B, n); lower > upper if it is empty.

    Where the plane below a row exceeds its limit there is no counter-example. With t >= 0 the distance from the
    plane's least value to the limit, that cuts x_i <= l_i + t / a_i for a_i > 0, and x_i >= u_i - t / |a_i| for
    a_i < 0. A group needs all of its rows, so its cuts add up; of several groups the hull is taken.
    """
    room = (-found.excess).clamp(min=0)[:, :, None]
    width = (upper - lower)[:, None]
    share = room / found.slopes.abs().clamp(min=1e-300) * (1 + SLACK) + SLACK * width
    keep = torch.minimum(share, width)  # of the width, from the side where the plane is lowest
    above = torch.where(found.slopes > 0, lower[:, None] + keep, upper[:, None])
    below = torch.where(found.slopes < 0, upper[:, None] - keep, lower[:, None])
    open_ = conditions.worst(found.excess) <= 0
    index = conditions.group[None, :, None].expand_as(above)
    shape = (len(lower), conditions.groups, lower.shape[1])
    high = above.new_full(shape, torch.inf).scatter_reduce(1, index, above, "amin")
    low = below.new_full(shape, -torch.inf).scatter_reduce(1, index, below, "amax")
    empty = (low > high).any(2) | ~open_
    high = torch.where(empty[:, :, None], -torch.inf, high).amax(1)
    low = torch.where(empty[:, :, None], torch.inf, low).amin(1)
    return torch.maximum(low, lower), torch.minimum(high, upper)
