"""Interval bound propagation: a box in, a box out, one rule per operation.

With sound=True every box is widened by what rounding can do, so that it holds for the network in real arithmetic and
for any floating-point evaluation of it (any order of summation, any batch size).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounding.core.rounding import gamma, underflow, unit
from holdfast.bounding.fast.fused import ends, halves
from holdfast.bounding.fast.layout import like_maps
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.errors import SoundnessError, UnsupportedError

Interval = tuple[Tensor, Tensor]

EXACT = {"relu", "relu6", "hardtanh"}  # selections and clippings: no rounding
ULPS = 8  # of a transcendental function in torch's vectorised kernels, generously


def check_order(lower: Tensor, upper: Tensor, name: str) -> None:
    """Refuse bounds of `name` that contradict each other; bounds that account for rounding never do.

    Raises:
        SoundnessError: a lower bound lies above its upper bound.
    """
    if bool((lower > upper).any()):
        raise SoundnessError(
            f"a lower bound of {name} lies above its upper bound. This is a bug in Holdfast: nothing that follows from "
            "these bounds is proved. Please report it with the model."
        )


def propagate(graph: Graph, lower: Tensor, upper: Tensor, *, sound: bool) -> list[Interval]:
    """Bounds of every node over the box [lower, upper], each (B, *shape)."""
    return graph.walk((lower, upper), lambda node, intervals: step(node, intervals, sound=sound))


def step(node: Node, intervals: list[Interval], *, sound: bool) -> Interval:
    """The rule of one operation."""
    lower, upper = intervals[0]
    match node.op:
        case ops.Affine():
            return affine(node.op, lower, upper, sound=sound)
        case ops.Activation():
            bounds = node.op.ends(lower, upper)
            return bounds if not sound or node.op.kind in EXACT else widen(*bounds, ulps=ULPS)
        case ops.MaxPool() | ops.MinMax() | ops.Unroll():
            return node.op.apply(lower), node.op.apply(upper)
        case ops.Add():
            bounds = lower + intervals[1][0], upper + intervals[1][1]
            return widen(*bounds, ulps=2) if sound else bounds
        case ops.Reshape():
            return like_maps(lower).reshape(-1, *node.shape), like_maps(upper).reshape(-1, *node.shape)
        case ops.Concat():
            return torch.cat([i[0] for i in intervals], node.op.dim), torch.cat([i[1] for i in intervals], node.op.dim)
    raise UnsupportedError(f"layer '{node.name}': interval bounds have no rule for {type(node.op).__name__}")


def widen(lower: Tensor, upper: Tensor, *, ulps: int) -> Interval:
    """Move both ends outward by that many units in the last place."""
    u, tiny = 2 * ulps * unit(lower.dtype), underflow(0, lower.dtype)
    return lower - (u * lower.abs() + tiny), upper + (u * upper.abs() + tiny)


def centre_radius(lower: Tensor, upper: Tensor, *, sound: bool) -> Interval:
    """A centre and a radius such that [lower, upper] lies within centre -+ radius, in real arithmetic if sound."""
    if not sound:
        return halves(lower, upper)
    centre = (lower + upper) / 2
    radius = torch.maximum(upper - centre, centre - lower)
    return centre, radius * (1 + 4 * unit(lower.dtype)) + underflow(0, lower.dtype)


def affine(op: ops.Affine, lower: Tensor, upper: Tensor, *, sound: bool) -> Interval:
    """A c + b -+ |A| r.

    Rounding: the product with the centre is off by g (|A| |c| + |b|), g = gamma(terms); an evaluation in floating point
    at a point of the box by g (|A| (|c| + r) + |b|). The centre and the two ends are off by a few u (|c| + r) or, after
    the product, u (|A| |c| + |b| + spread). All of it is covered by enlarging the radius by (2 g + 16 u) (|c| + r)
    before the product with |A|, the bias likewise, and everything by the factor 1 + 4 g for that product itself. Halves
    and products that underflow add the smallest normal numbers, before the product with |A| and after it.
    """
    if not sound:
        centre, radius = halves(lower, upper)
        return ends(op.apply(centre), op.apply_abs(radius))
    centre = (lower + upper) / 2
    middle = op.apply(centre)
    g, u = gamma(op.terms, lower.dtype), unit(lower.dtype)
    extra, grow = 2 * g + 16 * u, 1 + 4 * g
    radius = torch.add((upper - lower) * (0.5 * (1 + extra) * grow), centre.abs(), alpha=extra * grow)
    radius = radius + underflow(0, lower.dtype)
    spread = op.apply_abs(radius, extra * grow, underflow(op.terms, lower.dtype))
    return middle - spread, middle + spread


def output_bounds(graph: Graph, lower: Tensor, upper: Tensor, *, sound: bool) -> Interval:
    """Bounds of the logits over the box, (B, K) each."""
    return propagate(graph, lower, upper, sound=sound)[-1]


def margin_bounds(graph: Graph, lower: Tensor, upper: Tensor, y: Tensor, *, sound: bool) -> Tensor:
    """Lower bounds of z_y - z_j for every class j over the box, shape (B, K); zero at j = y."""
    return margins(graph, propagate(Graph(graph.nodes[:-1]), lower, upper, sound=sound), y, sound=sound)


def margins(graph: Graph, intervals: list[Interval], y: Tensor, *, sound: bool) -> Tensor:
    """Lower bounds of z_y - z_j from the bounds of all nodes but the last, shape (B, K); zero at j = y.

    The differences are merged into the last layer if that is fully connected ("elision"), which is never looser than
    the difference of two logit bounds.
    """
    last = graph.nodes[-1]
    if isinstance(last.op, ops.Linear) and len(last.shape) == 1:
        merged = _elided(last.op, *intervals[last.inputs[0]], y, sound=sound)
    else:
        low, high = step(last, [intervals[i] for i in last.inputs], sound=sound)
        merged = low.gather(1, y[:, None]) - high
        merged = merged - 4 * unit(low.dtype) * merged.abs() if sound else merged
    return merged.scatter(1, y[:, None], 0.0)


def _elided(op: ops.Linear, lower: Tensor, upper: Tensor, y: Tensor, *, sound: bool) -> Tensor:
    """(W_y - W_j) c - |W_y - W_j| r + b_y - b_j for all j at once, (B, K)."""
    centre, radius = centre_radius(lower, upper, sound=sound)
    logits = op.apply(centre)
    # |W_y - W_j| depends only on the class: one product per class that occurs, and no tensor of shape (B, K, n).
    classes, position = torch.unique(y, return_inverse=True)
    gaps = (op.weight[classes][:, None] - op.weight).abs()
    spread = (radius @ gaps.flatten(0, 1).T).view(len(y), len(classes), len(op.weight))
    spread = spread[torch.arange(len(y), device=y.device), position]
    merged = logits.gather(1, y[:, None]) - logits - spread
    if not sound:
        return merged
    # Here each logit is rounded by itself, and so it is when the network is run: gamma (|W| m + |b|) for both of them.
    g = gamma(op.terms, lower.dtype)
    error = F.linear(centre.abs() + radius, op.weight.abs(), op.bias_abs)
    error = 2 * (error + error.gather(1, y[:, None]))
    lost = 4 * underflow(op.terms, lower.dtype) + underflow(0, lower.dtype) * radius.sum(1, keepdim=True)
    return merged - (g * (error + 4 * spread) * (1 + 4 * g) + lost)
