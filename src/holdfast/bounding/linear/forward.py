"""Linear bounds in one forward sweep: every neuron is an affine function of the input plus an interval.

A node is kept as V x' + m with m in [m_low, m_up]. An affine layer maps V and the interval; an activation is replaced
by two parallel lines, d z + a_low and d z + a_up, which keeps one V for both sides: V becomes d V and the interval
d m + a. Additions add, concatenations concatenate. The neuron's own range over the region, which the lines need, comes
from the same form. (The "IBP-inspired" bounds of Liu, Salzmann and Susstrunk, "Training provably robust models by
polyhedral envelope regularization", 2021.)

Cheaper than a backward pass for each layer where the network is deep and the input small: cost and memory are those of
as many forward passes as the input has values. Looser, since the interval m forgets what cancels.

Rounding (sound=True): V is taken as it was computed. With s a bound of |z|, made of |V| |x'| and m, an affine layer is
then off by at most gamma (|W| s + |b|) where V is carried through it and by as much again when the network is run; m is
widened by three times that. Lines, sums and smooth activations cost a few units of s. Values that underflow cost the
smallest normal number each.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region, minimum
from holdfast.bounding.core.rounding import gamma, underflow, unit
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


def forward_planes(graph: Graph, region: Region, y: Tensor, *, sound: bool = False) -> Planes:
    """Linear lower bounds of z_y - z_j over the region, one row for each class j; the row of j = y is zero.

    Args:
        graph: a network of affine layers, activations with a linear relaxation, additions and concatenations.
        region: the inputs, (B, ...).
        y: labels (B,).
        sound: account for rounding, of the bounds and of the network itself.

    Returns:
        Planes with coefficients (B, K, ...) and shift (B, K), as `linear.margin_planes` gives them.
    """
    forms = propagate(Graph(graph.nodes[:-1]), region, sound=sound)
    last = graph.nodes[-1]
    rows = torch.arange(len(y), device=y.device)
    if isinstance(last.op, ops.Linear) and len(last.shape) == 1:
        slopes, shift = _elided(last.op, forms[last.inputs[0]], region, y, sound=sound)
    else:
        form = _step(last, [forms[i] for i in last.inputs], region, sound=sound)
        slopes = form.slopes[rows, :, y][:, :, None] - form.slopes
        shift = form.low.gather(1, y[:, None]) - form.high
        if sound:
            size = form_size(form, region)
            shift = shift - 4 * unit(shift.dtype) * (size + size.gather(1, y[:, None])) - _lost(0, region)
        shift = shift.scatter(1, y[:, None], 0.0)
    return Planes(Coefficients(slopes.mT.reshape(*shift.shape, *graph.nodes[0].shape)), shift)


def _elided(op: ops.Linear, form: Form, region: Region, y: Tensor, *, sound: bool) -> tuple[Tensor, Tensor]:
    """Slopes (B, n, K) and shifts (B, K): the differences merged into the last layer before anything is forgotten."""
    gaps = op.weight[y][:, None] - op.weight
    slopes = form.slopes @ gaps.mT
    shift = (gaps.clamp(min=0) @ form.low[:, :, None] + gaps.clamp(max=0) @ form.high[:, :, None])[:, :, 0]
    if op.bias is not None:
        shift = shift + (op.bias[y][:, None] - op.bias)
    if sound:
        reach = op.apply_abs(form_size(form, region), 1.0)
        lost = 4 * gamma(op.terms, shift.dtype) * (reach + reach.gather(1, y[:, None])) + _lost(2 * op.terms, region)
        shift = (shift - lost).scatter(1, y[:, None], 0.0)
    return slopes, shift


def propagate(graph: Graph, region: Region, *, sound: bool = False) -> list[Form]:
    """The forms of all nodes."""
    count = region.x[0].numel()
    identity = torch.eye(count, dtype=region.x.dtype, device=region.x.device).view(1, count, *region.x.shape[1:])
    nothing = torch.zeros_like(region.x)
    start = Form(identity.expand(len(region.x), *identity.shape[1:]), nothing, nothing)
    return graph.walk(start, lambda node, forms: _step(node, forms, region, sound=sound))


def form_bounds(form: Form, region: Region, *, sound: bool = False) -> interval.Interval:
    """Range of a node over the region, (B, *shape) each."""
    rows = form.slopes.flatten(2).mT.reshape(len(region.x), -1, *region.x.shape[1:])
    below, above = (minimum(region, Coefficients(v), sound=sound) for v in (rows, -rows))
    low, high = form.low + below.view_as(form.low), form.high - above.view_as(form.high)
    return interval.widen(low, high, ulps=2) if sound else (low, high)


def form_size(form: Form, region: Region) -> Tensor:
    """At least |V| |x'| + |m| over the region, and so at least |z|, (B, *shape)."""
    largest = torch.maximum(region.lower.abs(), region.upper.abs()).flatten(1)
    carried = (form.slopes.flatten(2).abs() * largest[:, :, None]).sum(1).view_as(form.low)
    total = carried + torch.maximum(form.low.abs(), form.high.abs())
    return total * (1 + 2 * gamma(largest.shape[1], total.dtype)) + underflow(largest.shape[1], total.dtype)


def _lost(terms: int, region: Region) -> Tensor:
    """What underflows can cost: `terms` of them in each coefficient of the input, and in the shift, (B, 1)."""
    largest = torch.maximum(region.lower.abs(), region.upper.abs()).flatten(1)
    lost: Tensor = 2 * underflow(terms, largest.dtype) * (1 + largest.sum(1, keepdim=True))
    return lost


def _step(node: Node, forms: list[Form], region: Region, *, sound: bool) -> Form:
    """The form of a node; m is widened by what rounding costs if sound."""
    found = _exact_step(node, forms, region, sound=sound)
    if not sound or isinstance(node.op, ops.Reshape | ops.Concat):
        return found
    sizes = [form_size(form, region) for form in forms]
    u = unit(found.low.dtype)
    match node.op:
        case ops.Affine():
            lost = 3 * gamma(node.op.terms, found.low.dtype) * node.op.apply_abs(sizes[0], 1.0)
            terms = node.op.terms
        case ops.Activation():
            own = 0.0 if node.op.kind in interval.EXACT else 4 * interval.ULPS * u
            lost, terms = 16 * u * sizes[0] + (16 * u + own) * form_size(found, region), 1
        case _:
            lost, terms = 8 * u * (sizes[0] + sizes[1]), 0
    lost = lost + _lost(terms, region).view(-1, *[1] * len(node.shape))
    return Form(found.slopes, *interval.widen(found.low - lost, found.high + lost, ulps=2))


def _exact_step(node: Node, forms: list[Form], region: Region, *, sound: bool) -> Form:
    """The form of a node, as if its slopes were exact."""
    form = forms[0]
    match node.op:
        case ops.Affine():
            carried = linear_part(node.op, form.slopes.flatten(0, 1))
            box = interval.affine(node.op, form.low, form.high, sound=sound)
            return Form(carried.view(*form.slopes.shape[:2], *node.shape), *box)
        case ops.Activation():
            lines = relax(node.op, *form_bounds(form, region, sound=sound), "parallel", node.name)
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
