"""Cut boxes of inputs down to where interval arithmetic, forwards and backwards, leaves room for a counter-example.

Forwards, every node gets an interval. Backwards from the conditions, a sum of terms with an upper limit leaves each
term at most the limit less the smallest values of all others, and so bounds each input of a dense layer; an activation
that is not decreasing passes bounds of its output on to its input. (HC4 in constraint programming: Benhamou et al.,
"Revising hull and box consistency", 1999.) On networks that encode clauses this is unit propagation.

What is bounded are the values as computed: a node may add what it rounds (`bounding.core.evaluation`).
"""

import math

import torch
from torch import Tensor

from holdfast.bounding import interval
from holdfast.bounding.core.evaluation import own_error
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.interval import Interval
from holdfast.bounding.linear.relax import PIECEWISE
from holdfast.certificates.complete.problem import Conditions

ENTRIES = 2**17
"""Weights of a layer that is passed backwards; one beyond that is not."""
ROUNDS = 16
"""Times to go forwards and backwards, at most."""
PROGRESS = 0.01
"""Part of the width of a box that a round has to take off one of its sides for another one."""
SLACK = 1e-12
"""By which bounds stay looser, relative to the terms they are computed from: more than float64 rounds."""


def contract(
    graph: Graph, lower: Tensor, upper: Tensor, conditions: Conditions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Boxes (B, n) without parts that hold no counter-example; lower > upper somewhere if nothing is left.

    Args:
        graph: in float64.
        lower: (B, n) float64.  upper: (B, n) float64.
        conditions: of one group: a counter-example meets all of them.
        dtype: in which the network is run.
    """
    whole, shape = upper - lower, graph.nodes[0].shape
    alive = (lower <= upper).all(1)
    lower, upper = lower.clone(), upper.clone()
    for _ in range(ROUNDS if bool(alive.any()) else 0):
        low, high = _round(graph, lower[alive].view(-1, *shape), upper[alive].view(-1, *shape), conditions, dtype)
        less = (upper[alive] - lower[alive]) - (high - low)
        moved = (less > PROGRESS * whole[alive]).any(1) & (low <= high).all(1)
        lower[alive], upper[alive] = low, high
        alive = alive.clone().masked_scatter_(alive, moved)
        if not bool(alive.any()):
            break
    return lower, upper


def _round(graph: Graph, lower: Tensor, upper: Tensor, conditions: Conditions, dtype: torch.dtype) -> Interval:
    """One pass forwards and one backwards, (B, n) each."""
    whole = lower, upper
    bounds, errors = [whole], [torch.zeros_like(lower)]
    for node in graph.nodes[1:]:
        inputs = [bounds[k] for k in node.inputs]
        low, high = interval.step(node, inputs, sound=True)
        error = own_error(node, inputs, (low, high), dtype)
        errors.append(torch.zeros_like(low) if error is None else error)
        bounds.append((low - errors[-1], high + errors[-1]))
    output = bounds[-1]
    bounds[-1] = _dense(conditions.rows, *output, None, conditions.limits.expand(len(lower), -1))
    for i in range(len(graph.nodes) - 1, 0, -1):
        node, (low, high) = graph.nodes[i], bounds[i]
        before = bounds[node.inputs[0]]
        match node.op:
            case ops.Linear() if node.op.weight.numel() <= ENTRIES and len(node.shape) == 1:
                bias = 0.0 if node.op.bias is None else node.op.bias
                low, high = low - errors[i] - bias, high + errors[i] - bias
                bounds[node.inputs[0]] = _dense(node.op.weight, *before, low, high)
            case ops.Activation() if node.op.kind in PIECEWISE:
                bounds[node.inputs[0]] = _inverse(node.op.parameter, *before, low - errors[i], high + errors[i])
            case ops.Reshape():
                bounds[node.inputs[0]] = _both(before, (low.reshape(before[0].shape), high.reshape(before[0].shape)))
    crossed = torch.stack([(low > high).flatten(1).any(1) for low, high in bounds]).any(0)[:, None]
    low, high = (torch.where(end.isnan(), old, end).flatten(1) for end, old in zip(bounds[0], whole, strict=True))
    return torch.where(crossed, math.inf, low), torch.where(crossed, -math.inf, high)


def _both(a: Interval, b: Interval) -> Interval:
    return torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1])


def _dense(weight: Tensor, lower: Tensor, upper: Tensor, low: Tensor | None, high: Tensor) -> Interval:
    """Bounds of x in [lower, upper] (B, n) where low <= W x <= high, (B, m)."""
    up, down = weight.clamp(min=0), weight.clamp(max=0)
    size = torch.maximum(lower.abs(), upper.abs()) @ weight.abs().T
    slack = SLACK * (size + high.abs() + (0.0 if low is None else low.abs()))
    room = high - (lower @ up.T + upper @ down.T) + slack  # of the sum above its smallest value
    found = _sides(weight, lower, upper, room)
    if low is None:
        return found
    return _both(found, _sides(-weight, lower, upper, (upper @ up.T + lower @ down.T) - low + slack))


def _sides(weight: Tensor, lower: Tensor, upper: Tensor, room: Tensor) -> Interval:
    """Bounds of x where no term of W x exceeds its smallest value by more than `room` (B, m); crossed if it is < 0."""
    room = room.nan_to_num(nan=math.inf, neginf=math.inf)  # an overflow proves nothing
    most, least = (torch.where(one > 0, room[:, :, None] / one, math.inf).amin(1) for one in (weight, -weight))
    spare = SLACK * (lower.abs() + upper.abs())
    return torch.maximum(lower, upper - least - spare), torch.minimum(upper, lower + most + spare)


def _inverse(slope: float, lower: Tensor, upper: Tensor, low: Tensor, high: Tensor) -> Interval:
    """Bounds of z in [lower, upper] where low <= max(z, slope z) <= high."""
    above = torch.where(high < 0, high / slope if slope else torch.full_like(high, -math.inf), high)
    below = torch.where(low > 0, low, low / slope if slope else torch.full_like(low, -math.inf))
    spare = SLACK * (above.abs().nan_to_num(posinf=0.0) + below.abs().nan_to_num(posinf=0.0))
    return torch.maximum(lower, below - spare), torch.minimum(upper, above + spare)
