"""Linear bounds in one forward sweep: every neuron is an affine function of the input plus an interval.

A node is kept as V x' + m with m in [m_low, m_up]. An affine layer maps V and the interval; an activation is replaced
by two parallel lines, d z + a_low and d z + a_up, which keeps one V for both sides: V becomes d V and the interval
d m + a. Additions add, concatenations concatenate. The neuron's own range over the region, which the lines need, comes
from the same form. (The "IBP-inspired" bounds of Liu, Salzmann and Susstrunk, "Training provably robust models by
polyhedral envelope regularization", 2021.)

Cheaper than a backward pass for each layer where the network is deep and the input small: cost and memory are those of
as many forward passes as the input has values. Looser, since the interval m forgets what cancels. In real arithmetic:
rounding is not covered, so it serves training and envelopes, and no certificate rests only on it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region, minimum
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.linear.coefficients import Coefficients
from holdfast.bounding.linear.relax import relax
from holdfast.bounding.linear.relaxation import Planes
from holdfast.errors import UnsupportedError, argument


@dataclass(frozen=True, eq=False)
class Form:
    """V x' + [low, high]: `slopes` V (B, n, *shape) for the n values of the input, `low` and `high` (B, *shape)."""

    slopes: Tensor
    low: Tensor
    high: Tensor


def forward_planes(graph: Graph, region: Region, y: Tensor) -> Planes:
    """Linear lower bounds of z_y - z_j over the region, one row for each class j; the row of j = y is zero.

    Args:
        graph: a network of affine layers, activations with a linear relaxation, additions and concatenations.
        region: the inputs, (B, ...).
        y: labels (B,).

    Returns:
        Planes with coefficients (B, K, ...) and shift (B, K), as `linear.margin_planes` gives them.
    """
    forms = propagate(Graph(graph.nodes[:-1]), region)
    last = graph.nodes[-1]
    rows = torch.arange(len(y), device=y.device)
    if isinstance(last.op, ops.Linear) and len(last.shape) == 1:
        # Elision: the differences are merged into the last layer before the interval forgets what cancels.
        form, weight = forms[last.inputs[0]], last.op.weight
        gaps = weight[y][:, None] - weight
        slopes = form.slopes @ gaps.mT
        shift = gaps.clamp(min=0) @ form.low[:, :, None] + gaps.clamp(max=0) @ form.high[:, :, None]
        shift = shift[:, :, 0]
        if last.op.bias is not None:
            shift = shift + (last.op.bias[y][:, None] - last.op.bias)
    else:
        form = _step(last, [forms[i] for i in last.inputs], region)
        slopes = form.slopes[rows, :, y][:, :, None] - form.slopes
        shift = (form.low.gather(1, y[:, None]) - form.high).scatter(1, y[:, None], 0.0)
    return Planes(Coefficients(slopes.mT.reshape(*shift.shape, *graph.nodes[0].shape)), shift)


def propagate(graph: Graph, region: Region) -> list[Form]:
    """The forms of all nodes."""
    count = region.x[0].numel()
    identity = torch.eye(count, dtype=region.x.dtype, device=region.x.device).view(1, count, *region.x.shape[1:])
    nothing = torch.zeros_like(region.x)
    start = Form(identity.expand(len(region.x), *identity.shape[1:]), nothing, nothing)
    return graph.walk(start, lambda node, forms: _step(node, forms, region))


def form_bounds(form: Form, region: Region) -> interval.Interval:
    """Range of a node over the region, (B, *shape) each."""
    rows = form.slopes.flatten(2).mT.reshape(len(region.x), -1, *region.x.shape[1:])
    below, above = (minimum(region, Coefficients(v), sound=False) for v in (rows, -rows))
    return form.low + below.view_as(form.low), form.high - above.view_as(form.high)


def _step(node: Node, forms: list[Form], region: Region) -> Form:
    form = forms[0]
    match node.op:
        case ops.Affine():
            carried = linear_part(node.op, form.slopes.flatten(0, 1))
            box = interval.affine(node.op, form.low, form.high, sound=False)
            return Form(carried.view(*form.slopes.shape[:2], *node.shape), *box)
        case ops.Activation():
            lines = relax(node.op, *form_bounds(form, region), "parallel", node.name)
            low, d = lines.lower_shift, lines.upper_slope
            below = d * form.low if low is None else d * form.low + low
            return Form(form.slopes * d[:, None], below, d * form.high + lines.upper_shift)
        case ops.Add():
            other = forms[1]
            return Form(form.slopes + other.slopes, form.low + other.low, form.high + other.high)
        case ops.Reshape():
            box = form.low.reshape(-1, *node.shape), form.high.reshape(-1, *node.shape)
            return Form(form.slopes.reshape(*form.slopes.shape[:2], *node.shape), *box)
        case ops.Concat():
            slopes = torch.cat([f.slopes for f in forms], node.op.dim + 1)
            low, high = (torch.cat(ends, node.op.dim) for ends in ([f.low for f in forms], [f.high for f in forms]))
            return Form(slopes, low, high)
    raise UnsupportedError(
        f"layer '{node.name}': the forward affine form has no rule for {type(node.op).__name__}; "
        f"use {argument('method', 'crown-ibp')}, whose backward pass has one"
    )


def linear_part(op: ops.Affine, x: Tensor) -> Tensor:
    """A x without the shift, (N, *in) -> (N, *out)."""
    match op:
        case ops.Linear() | ops.Conv():
            return replace(op, bias=None).apply(x)
        case ops.Scale():
            return op.factor * x
    return op.apply(x)  # an Average has no shift
