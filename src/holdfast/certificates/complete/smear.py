"""How much each input can move a linear function of the outputs: the interval gradient times the width of the box.

A gradient at one point misses inputs that act through neurons that are off there. Here the derivative of every
activation is an interval over the box, and is carried back to the input as centre and radius (the "smear" of interval
analysis). It chooses where to split, and nothing is proved with it, so rounding is left alone.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.interval import Interval
from holdfast.bounding.linear.backward import windows
from holdfast.bounding.linear.relax import PIECEWISE, chord, derivative_range

Gradient = tuple[Tensor, Tensor]
"""Centre and radius, (B, *shape) each."""


def smear(graph: Graph, intervals: list[Interval], rows: Tensor, cap: float = math.inf) -> Tensor:
    """A bound of the gradient of <rows, z> over each box, absolute values, (B, n).

    Args:
        graph: the network.
        intervals: bounds of every node over the boxes, (B, *shape) each.
        rows: (B, K), one linear function of the outputs for each box.
        cap: the derivative of an unstable (leaky) ReLU counts for at most so many times the slope of its chord: a
            neuron that is hardly ever on counts for as little as its values can vary. Without it, a bound.
    """
    pending: dict[int, Gradient] = {len(graph.nodes) - 1: (rows, torch.zeros_like(rows))}
    for j in range(len(graph.nodes) - 1, 0, -1):
        if j not in pending:
            continue
        node = graph.nodes[j]
        for k, (centre, radius) in zip(node.inputs, _back(graph, node, *pending.pop(j), intervals, cap), strict=True):
            old = pending.get(k)
            pending[k] = (centre, radius) if old is None else (old[0] + centre, old[1] + radius)
    if 0 not in pending:
        return rows.new_zeros(len(rows), intervals[0][0][0].numel())
    centre, radius = pending[0]
    return (centre.abs() + radius).flatten(1)


def _back(
    graph: Graph, node: Node, centre: Tensor, radius: Tensor, intervals: list[Interval], cap: float
) -> list[Gradient]:
    match node.op:
        case ops.Affine():
            return [(node.op.transpose(centre), _absolute(node.op).transpose(radius))]
        case ops.Activation():
            low, high = _range(node.op, *intervals[node.inputs[0]], cap)
            middle, half = (low + high) / 2, (high - low) / 2
            return [(centre * middle, centre.abs() * half + radius * (middle.abs() + half))]
        case ops.Reshape():
            shape = graph.nodes[node.inputs[0]].shape
            return [(centre.reshape(-1, *shape), radius.reshape(-1, *shape))]
        case ops.Concat():
            sizes = [graph.nodes[k].shape[node.op.dim - 1] for k in node.inputs]
            return list(zip(centre.split(sizes, node.op.dim), radius.split(sizes, node.op.dim), strict=True))
        case ops.MaxPool():
            return [_max_pool(node.op, centre, radius, *intervals[node.inputs[0]])]
        case ops.MinMax():
            return [_min_max(centre, radius, *intervals[node.inputs[0]])]
    return [(centre, radius)] * len(node.inputs)  # Add


def _max_pool(op: ops.MaxPool, centre: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Gradient:
    """A window passes its gradient to the place of its maximum: to one of those that may be the largest."""
    out = centre.shape[2:]
    able = (windows(op, upper, out, -torch.inf) >= op.apply(lower)[..., None, None]).to(centre)
    known = (able.flatten(4).sum(4) == 1)[..., None, None]
    half = torch.where(known, 0.0, 0.5 * able)
    middle, centre, radius = able - half, centre[..., None, None], radius[..., None, None]
    at = torch.zeros_like(lower, requires_grad=True)
    with torch.enable_grad():
        places = windows(op, at, out, 0.0)

    def gathered(each: Tensor) -> Tensor:
        return torch.autograd.grad(places, at, each, retain_graph=True)[0]

    return gathered(centre * middle), gathered(centre.abs() * half + radius * able)


def _min_max(centre: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Gradient:
    """The first of a pair is the maximum by a share s, known or anything in [0, 1], and the minimum by 1 - s."""
    (low, low_), (high, high_) = (end.unflatten(1, (-1, 2)).unbind(2) for end in (lower, upper))
    middle = torch.where(low > high_, 1.0, torch.where(high < low_, 0.0, 0.5))
    half = 0.5 - (middle - 0.5).abs()
    (large, small), (off, off_) = (part.unflatten(1, (-1, 2)).unbind(2) for part in (centre, radius))
    spread = (large - small).abs() * half
    sides = [
        (large * s + small * (1 - s), spread + off * (s + half) + off_ * (1 - s + half)) for s in (middle, 1 - middle)
    ]
    centres, radii = (torch.stack(part, 2).flatten(1, 2) for part in zip(*sides, strict=True))
    return centres, radii


def _range(op: ops.Activation, lower: Tensor, upper: Tensor, cap: float) -> Gradient:
    """Range of the derivative, capped."""
    low, high = derivative_range(op, lower, upper)
    if op.kind not in PIECEWISE or cap == math.inf:
        return low, high
    return low, torch.where(low < high, torch.minimum(high, cap * chord(op.parameter, lower, upper)), high)


def _absolute(op: ops.Affine) -> ops.Affine:
    """The operation with the absolute values of its weights."""
    match op:
        case ops.Linear() | ops.Conv():
            return replace(op, weight=op.weight.abs())
        case ops.Scale():
            return replace(op, factor=op.factor.abs())
    return op  # an Average has no negative weights
