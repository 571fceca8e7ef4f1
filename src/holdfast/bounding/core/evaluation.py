"""How far the nodes of a network that is run in floating point stray from real arithmetic, on the values they have.

A computed layer adds up k products that can differ from zero; products with zero, and sums with it, are exact. In any
order, with or without fused multiply-add, there are at most k - 1 additions that round, each relative to a sum of some
of the products. Such a sum is at most M = max(P, N) in size, P the sum of the positive products and N the sum of
the negative ones, not P + N. With P and N at their largest over the box of the inputs, the layer is off by at most

    (k - 1) u / (1 - (k - 1) u) (1 + u) M  +  u (P + N):

the additions, and the products themselves. A ReLU selects, and a neuron that is never active is exactly zero.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.bounding.core.rounding import gamma, underflow, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.interval import EXACT, ULPS, Interval

SLACK = 1 + 1e-6
"""Covers the float64 arithmetic of the errors themselves, with sums of up to a million terms."""


def doubled(graph: Graph) -> Graph:
    """The network in float64 with the very weights that it has: those that a model computes are not computed anew."""

    def cast(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def op(one: ops.Op) -> ops.Op:
        if not isinstance(one, ops.Linear | ops.Conv | ops.Scale):
            return one
        return replace(one, **{field.name: cast(getattr(one, field.name)) for field in fields(one)})

    return Graph(tuple(replace(node, op=op(node.op)) for node in graph.nodes))


def own_error(node: Node, inputs: list[Interval], output: Interval, dtype: torch.dtype) -> Tensor | None:
    """How far a node computed in `dtype` can be from the exact operation on the same inputs; None where it is exact.

    Args:
        node: the operation, in float64.
        inputs: boxes (B, *shape) of the values that it is given as computed, in float64.
        output: a box of the exact operation on them.
        dtype: in which the network is run.

    Returns:
        (B, *shape), infinite where the computed value may overflow.
    """
    match node.op:
        case ops.Linear() | ops.Conv():
            error, largest = _sum_of_products(node.op, *inputs[0], dtype)
        case ops.Affine():
            largest = node.op.apply_abs(_magnitude(inputs[0]) + _lost(dtype), 1.0)
            error = gamma(node.op.terms, dtype) * largest + underflow(node.op.terms, dtype)
        case ops.Activation() if node.op.kind in EXACT:
            return None
        case ops.Activation():
            largest = _magnitude(output)
            error = 2 * ULPS * unit(dtype) * largest + node.op.error + underflow(0, dtype)
        case ops.Add():
            largest = _magnitude(inputs[0]) + _magnitude(inputs[1])
            error = 2 * unit(dtype) * _magnitude(output) + underflow(0, dtype)
        case _:
            return None
    return torch.where(largest < torch.finfo(dtype).max / 2, error * SLACK, torch.inf)


def evaluation_errors(graph: Graph, intervals: list[Interval], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """By how much each node computed in `dtype` can miss real arithmetic, and what of that the node itself adds.

    Errors are passed forward: an affine layer turns e into |A| e; activations, maxima and pair sorting are 1-Lipschitz
    in the largest error of what they see.

    Args:
        graph: the network in float64.
        intervals: boxes (B, *shape) of all nodes in real arithmetic.
        dtype: in which the network is run.
    """
    errors, own = [torch.zeros_like(intervals[0][0])], [torch.zeros_like(intervals[0][0])]
    for i, node in enumerate(graph.nodes[1:], start=1):
        given = [errors[k] for k in node.inputs]
        met = [(intervals[k][0] - errors[k], intervals[k][1] + errors[k]) for k in node.inputs]
        passed = _passed(node, given, met)
        low, high = intervals[i]
        added = own_error(node, met, (low - passed, high + passed), dtype)
        own.append(torch.zeros_like(passed) if added is None else added)
        errors.append((passed + own[-1]) * SLACK)
    return errors, own


def evaluation_error(graph: Graph, intervals: list[Interval], dtype: torch.dtype) -> Tensor:
    """By how much logits computed in `dtype` can miss the logits of real arithmetic, (B, K)."""
    return evaluation_errors(graph, intervals, dtype)[0][-1]


def _passed(node: Node, given: list[Tensor], met: list[Interval]) -> Tensor:
    """What the errors of its inputs can do to the exact operation."""
    match node.op:
        case ops.Affine():
            return node.op.apply_abs(given[0])
        case ops.Activation() if node.op.kind in ("relu", "leaky_relu"):
            # Below zero, and there are often many such neurons, only the slope's share of the error gets through.
            slope = node.op.parameter
            return slope * given[0] + (1 - slope) * torch.minimum(given[0], met[0][1].clamp(min=0))
        case ops.Activation():
            return given[0]
        case ops.MinMax():
            pairs: Tensor = given[0].unflatten(1, (-1, 2)).amax(2)
            return pairs.repeat_interleave(2, 1)
    return ops.evaluate(node.op, given)


def _magnitude(bounds: Interval) -> Tensor:
    return torch.maximum(bounds[0].abs(), bounds[1].abs())


def _lost(dtype: torch.dtype) -> float:
    """Added to the size of every factor: u times it is what a factor can lose where subnormal numbers are flushed."""
    return underflow(0, dtype) / unit(dtype)


def _sum_of_products(op: ops.Linear | ops.Conv, lower: Tensor, upper: Tensor, dtype: torch.dtype) -> Interval:
    """The error of a layer, and the largest sum of the sizes of its products."""
    up, down = upper.clamp(min=0), (-lower).clamp(min=0)
    total = op.apply_abs(up + down + _lost(dtype), 1.0)  # P + N
    largest = (total + op.apply(up - down).abs()) / 2  # P - N is linear in the ends of the box
    u, longest = unit(dtype), gamma(op.terms, dtype)  # which refuses sums that are too long
    adds = (_terms(op, (upper > 0) | (lower < 0)) - 1).clamp(min=0) * u
    error = adds / (1 - adds) * (1 + u) * largest + u * total + underflow(op.terms, dtype)
    if not torch.equal(op.weight, op.weight.to(dtype).to(op.weight)):
        # Weights that were computed anew in float64, such as normalised ones; the network computes them in its own way.
        error = error + (longest + gamma(op.weight.numel(), dtype)) * total
    return error, total


def _terms(op: ops.Linear | ops.Conv, alive: Tensor) -> Tensor:
    """How many products of each output can differ from zero, the bias counted, where `alive` says which inputs can."""
    bias = None if op.bias is None else (op.bias != 0).to(op.weight.dtype)
    ones = replace(op, weight=(op.weight != 0).to(op.weight.dtype), bias=bias)
    count: Tensor = ones.apply(alive.to(op.weight.dtype)).round()
    return count
