"""One step of a backward pass, from the coefficients of a node to its inputs: one rule per operation."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounding import interval
from holdfast.bounding.core.rounding import gamma, underflow, unit
from holdfast.bounding.fast import fused, layout
from holdfast.bounding.fast.transposed import conv_transpose
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.linear.coefficients import Coefficients, Window, clean, dense, dot, inner, seen
from holdfast.bounding.linear.relax import Lines, relax
from holdfast.errors import UnsupportedError

Step = tuple[list[Coefficients], Tensor | None]


def carry(
    graph: Graph,
    j: int,
    c: Coefficients,
    lines: Lines | None,
    given: Tensor | Lines | None,
    intervals: list[interval.Interval],
    *,
    sound: bool,
) -> Step:
    """Coefficients of the inputs of node j, and what is added to the bound of each row, or None.

    Args:
        graph: the network.
        j: the node.
        c: coefficients of its output.
        lines: lines of the node, if it is an activation.
        given: lower slopes that replace the slopes of `lines`, (B, 1 or M, *shape) or in the layout of c; or lines
            for every row, in the layout of c.
        intervals: bounds of every node.
        sound: account for rounding.
    """
    node = graph.nodes[j]
    before = graph.nodes[node.inputs[0]].shape
    match node.op:
        case ops.Activation():
            if isinstance(given, Lines):
                return _own_lines(c, given, intervals[node.inputs[0]], sound=sound)
            assert lines is not None
            return _activation(c, lines, given, intervals[node.inputs[0]], sound=sound)
        case ops.Conv() if c.window is not None:
            return _window(node.op, clean(c, node.shape), c.window)
        case ops.Scale(factor, shift) if c.window is not None and all(
            ops.is_per_channel(constant, node.shape[0]) for constant in (factor, shift)
        ):
            return _scaled_window(node.op, clean(c, node.shape))
        case ops.Affine():
            c = dense(c, node.shape)
            rows = c.values.flatten(0, 1)
            added = node.op.bias_dot(rows)
            carried = node.op.transpose(rows).view(*c.rows, *before)
            return [c.with_values(carried)], None if added is None else added.view(c.rows)
        case ops.Add():
            shared = replace(c, scratch=False)
            return [shared, shared], None
        case ops.Reshape():
            c = dense(c, node.shape)
            values = layout.like_bounds(c.values.reshape(*c.rows, *before), intervals[node.inputs[0]][0])
            return [replace(c, values=values)], None
        case ops.Concat():
            return _concat(graph, node, node.op, c), None
        case ops.MaxPool():
            return _max_pool(node.op, dense(c, node.shape).values, *intervals[node.inputs[0]], sound=sound)
        case ops.MinMax():
            return _min_max(node, c, *intervals[node.inputs[0]], sound=sound)
    raise UnsupportedError(f"layer '{node.name}': linear bounds have no rule for {type(node.op).__name__}")


def _window(op: ops.Conv, c: Coefficients, window: Window) -> Step:
    """Transposed convolution of only the windows; the padding of the map becomes an earlier start of the window."""
    rows = c.values.flatten(0, 2)
    values = conv_transpose(rows, op.weight, op.stride, (0, 0), (0, 0), op.groups, op.dilation)
    stride = (window.stride[0] * op.stride[0], window.stride[1] * op.stride[1])
    padding = (
        window.padding[0] * op.stride[0] + op.padding[0],
        window.padding[1] * op.stride[1] + op.padding[1],
    )
    added = op.bias_dot(rows)
    moved = replace(window, stride=stride, padding=padding)
    carried = Coefficients(values.view(*c.rows, *values.shape[1:]), moved, clean=False, scratch=True)
    return [carried], None if added is None else added.view(c.rows)


def _scaled_window(op: ops.Scale, c: Coefficients) -> Step:
    factor, shift = op.factor.reshape(-1, 1, 1), op.shift.reshape(-1)
    return [c.with_values(c.values * factor)], (c.values.sum((4, 5)) * shift).sum(3)


def _activation(c: Coefficients, lines: Lines, given: Tensor | None, before: interval.Interval, *, sound: bool) -> Step:
    """Positive coefficients take the line below, negative ones the line above.

    With p the positive part of a: p * low + (a - p) * up = a * up + p * (low - up), and likewise for the shifts.
    Rounding leaves the slope of a line off by at most 4 u, which costs 4 u |a| |z|; a shift may have underflowed.
    """
    a, up = c.values, seen(lines.upper_slope, c)
    through_zero = c.window is None and lines.lower_shift is None and len(a) == len(up)
    if fused.wanted(sound) and through_zero:
        low = seen(lines.lower_slope, c) if given is None else given
        carried, added = fused.bend(a, low, up, seen(lines.upper_shift, c))
        return [Coefficients(carried, scratch=True)], added
    if given is None:
        bend = seen(lines.lower_slope - lines.upper_slope, c)
    elif c.window is None or given.ndim == a.ndim:
        bend = given - up
    else:  # on windows, the slopes of a map are shared by its rows
        bend = seen(given[:, 0] - lines.upper_slope, c)
    # <a - p, shift> for the negative part, and <a - 2 p, cost> for the absolute values.
    vectors = [(1.0, seen(lines.upper_shift, c))]
    if sound:
        size = torch.maximum(before[0].abs(), before[1].abs())
        shifts = (
            lines.upper_shift.abs()
            if lines.lower_shift is None
            else torch.maximum(lines.upper_shift.abs(), lines.lower_shift.abs())
        )
        terms = a[(0,) * len(c.rows)].numel()
        vectors.append(
            (2.0, seen(8 * unit(a.dtype) * size + 4 * gamma(terms, a.dtype) * shifts + underflow(0, a.dtype), c))
        )
    whole = [inner(a, c, v) for _, v in vectors]
    carried = a * up
    overwrite = not torch.is_grad_enabled()
    positive = a.clamp_(min=0) if overwrite and c.scratch else a.clamp(min=0)
    added = torch.stack([w - n * inner(positive, c, v) for w, (n, v) in zip(whole, vectors, strict=True)]).sum(0)
    if lines.lower_shift is not None:
        added = added + dot(positive, c, lines.lower_shift)
    carried = carried.addcmul_(positive, bend) if overwrite else torch.addcmul(carried, positive, bend)
    return [Coefficients(carried, c.window, scratch=True)], added


def _own_lines(c: Coefficients, lines: Lines, before: interval.Interval, *, sound: bool) -> Step:
    """As `_activation`, with lines that each row has for itself; all in the layout of c."""
    assert lines.lower_shift is not None
    c = clean(c, tuple(before[0].shape[1:]))
    a, axes = c.values, tuple(range(len(c.rows), c.values.ndim))
    positive, negative = a.clamp(min=0), a.clamp(max=0)
    added = (positive * lines.lower_shift + negative * lines.upper_shift).sum(axes)
    if sound:
        size = seen(torch.maximum(before[0].abs(), before[1].abs()), c)
        shifts = torch.maximum(lines.lower_shift.abs(), lines.upper_shift.abs())
        terms = a[(0,) * len(c.rows)].numel()  # one of the two parts is zero
        cost = 8 * unit(a.dtype) * size + 4 * gamma(terms, a.dtype) * shifts + underflow(0, a.dtype)
        added = added - (a.abs() * cost).sum(axes) * (1 + 4 * gamma(terms, a.dtype))
    return [c.with_values(positive * lines.lower_slope + negative * lines.upper_slope)], added


def _concat(graph: Graph, node: Node, op: ops.Concat, c: Coefficients) -> list[Coefficients]:
    sizes = [graph.nodes[k].shape[op.dim - 1] for k in node.inputs]
    if c.window is not None and op.dim == 1:
        return [replace(c, values=part, scratch=False) for part in c.values.split(sizes, 3)]
    return [Coefficients(part) for part in dense(c, node.shape).values.split(sizes, op.dim + 1)]


def _max_pool(op: ops.MaxPool, a: Tensor, lower: Tensor, upper: Tensor, *, sound: bool) -> Step:
    """Lines below and above a maximum.

    Below: the value with the largest lower bound. Above: the same if no other can exceed it, else a constant, the
    largest upper bound.
    """
    a = a.expand(len(lower), *a.shape[1:])
    best, index = F.max_pool2d(lower, op.kernel, op.stride, op.padding, op.dilation, op.ceil_mode, return_indices=True)
    top = op.apply(upper)
    exact = (_rivals(op, upper, best.shape[2:], index) <= best).to(a.dtype)
    coefficients = a.clamp(min=0) + a.clamp(max=0) * exact[:, None]
    b, m = a.shape[:2]
    carried = a.new_zeros(b, m, lower.shape[1], lower.shape[2] * lower.shape[3])
    carried = carried.scatter_add(3, index.flatten(2)[:, None].expand(-1, m, -1, -1), coefficients.flatten(3))
    layout = Coefficients(a)
    added = dot(a.clamp(max=0), layout, (1 - exact) * top)
    if sound:
        added = added - gamma(a[0, 0].numel(), a.dtype) * dot(a.abs(), layout, top.abs())
    return [Coefficients(carried.view(b, m, *lower.shape[1:]))], added


def _rivals(op: ops.MaxPool, upper: Tensor, out: torch.Size, index: Tensor) -> Tensor:
    """Largest upper bound in each window, without the neuron `index`."""
    number = torch.arange(1, upper[0, 0].numel() + 1, device=upper.device).view(1, 1, *upper.shape[2:])
    own = windows(op, number, out, 0) == (index + 1)[..., None, None]
    return windows(op, upper, out, -torch.inf).masked_fill(own, -torch.inf).flatten(4).amax(4)


def windows(op: ops.MaxPool, v: Tensor, out: Sequence[int], fill: float) -> Tensor:
    """The values (B, C, H, W) in each window, (B, C, *out, *kernel), and `fill` where it reaches beyond them."""
    span = [op.dilation[i] * (op.kernel[i] - 1) + 1 for i in range(2)]
    spare = [op.padding[i] + op.stride[i] + span[i] for i in range(2)]  # ceil_mode may reach beyond the padding
    pads = (op.padding[1], spare[1], op.padding[0], spare[0])
    steps = F.pad(v, pads, value=fill).unfold(2, span[0], op.stride[0]).unfold(3, span[1], op.stride[1])
    return steps[:, :, : out[0], : out[1], :: op.dilation[0], :: op.dilation[1]]


def _min_max(node: Node, c: Coefficients, lower: Tensor, upper: Tensor, *, sound: bool) -> Step:
    """max(a, b) = b + relu(a - b) and min(a, b) = a - relu(a - b), with ReLU's lines for a - b."""
    lower, upper = lower.unflatten(1, (-1, 2)), upper.unflatten(1, (-1, 2))
    gap = (lower[:, :, 0] - upper[:, :, 1], upper[:, :, 0] - lower[:, :, 1])
    if sound:
        gap = interval.widen(*gap, ulps=2)
    lines = relax(ops.Activation("relu", torch.relu), *gap, "adaptive", node.name)
    channel = len(c.rows)
    a_max, a_min = c.values.unflatten(channel, (-1, 2)).unbind(channel + 1)
    half = c.with_values(a_max)
    low, up = seen(lines.lower_slope, half), seen(lines.upper_slope, half)
    # The coefficient of relu(a - b) is a_max in the maximum and -a_min in the minimum.
    s_max, s_min = torch.where(a_max > 0, low, up), torch.where(a_min < 0, low, up)
    first = a_max * s_max + a_min * (1 - s_min)
    second = a_max * (1 - s_max) + a_min * s_min
    added = dot(a_max.clamp(max=0) - a_min.clamp(min=0), half, lines.upper_shift)
    if sound:
        added = added - 2 * gamma(2 * c.values[(0,) * channel].numel(), added.dtype) * added.abs()
    return [c.with_values(torch.stack([first, second], channel + 1).flatten(channel, channel + 1))], added
