"""One step of a backward pass: from the coefficients of a node to those of its inputs, one rule per operation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounds import interval, ops
from holdfast.bounds.coefficients import Coefficients, Window, aligned, clean, dense, dot, seen
from holdfast.bounds.ops import Graph, Node
from holdfast.bounds.relax import Lines, relax
from holdfast.bounds.rounding import gamma, unit
from holdfast.errors import UnsupportedError

Step = tuple[list[Coefficients], Tensor | None]


def carry(
    graph: Graph,
    j: int,
    c: Coefficients,
    lines: Lines | None,
    given: Tensor | None,
    intervals: list[interval.Interval],
    *,
    sound: bool,
) -> Step:
    """Coefficients of the inputs of node j, and what is added to the bound, (B, M) or None.

    Args:
        graph: the network.
        j: the node.
        c: coefficients of its output.
        lines: of the node, if it is an activation.
        given: lower slopes to use instead of those of `lines`, (B, 1 or M, *shape).
        intervals: bounds of every node.
        sound: account for rounding.
    """
    node = graph.nodes[j]
    before = graph.nodes[node.inputs[0]].shape
    match node.op:
        case ops.Activation():
            assert lines is not None
            return _activation(c, lines, given, intervals[node.inputs[0]], sound=sound)
        case ops.Conv() if c.window is not None:
            return _window(node.op, clean(c, node.shape), c.window)
        case ops.Scale() if c.window is not None and node.op.factor.numel() in (1, node.shape[0]):
            return _scaled_window(node.op, clean(c, node.shape))
        case ops.Affine():
            a = dense(c, node.shape)
            rows = a.flatten(0, 1)
            added = node.op.bias_dot(rows)
            carried = node.op.transpose(rows).view(*a.shape[:2], *before)
            return [Coefficients(carried)], None if added is None else added.view(a.shape[:2])
        case ops.Add():
            return [c, c], None
        case ops.Reshape():
            return [Coefficients(dense(c, node.shape).reshape(*c.values.shape[:2], *before))], None
        case ops.Concat():
            return _concat(graph, node, node.op, c), None
        case ops.MaxPool():
            return _max_pool(node.op, dense(c, node.shape), *intervals[node.inputs[0]], sound=sound)
        case ops.MinMax():
            return _min_max(node, c, *intervals[node.inputs[0]], sound=sound)
    raise UnsupportedError(f"layer '{node.name}': linear bounds have no rule for {type(node.op).__name__}")


def _window(op: ops.Conv, c: Coefficients, window: Window) -> Step:
    """Transposed convolution of the windows alone; the padding of the map becomes an earlier start of the window."""
    rows = c.values.flatten(0, 1)
    values = ops.conv_transpose(rows, op.weight, op.stride, (0, 0), (0, 0), op.groups, op.dilation)
    stride = (window.stride[0] * op.stride[0], window.stride[1] * op.stride[1])
    padding = (
        window.padding[0] * op.stride[0] + op.padding[0],
        window.padding[1] * op.stride[1] + op.padding[1],
    )
    added = op.bias_dot(rows)
    carried = Coefficients(
        values.view(*c.values.shape[:2], *values.shape[1:]), Window(stride, padding), c.places, clean=False
    )
    return [carried], None if added is None else added.view(c.values.shape[:2])


def _scaled_window(op: ops.Scale, c: Coefficients) -> Step:
    factor, shift = op.factor.reshape(-1, 1, 1), op.shift.reshape(-1)
    return [c.with_values(c.values * factor)], (c.values.sum((3, 4)) * shift).sum(2)


def _activation(c: Coefficients, lines: Lines, given: Tensor | None, before: interval.Interval, *, sound: bool) -> Step:
    """Positive coefficients take the line below, negative ones the line above.

    With p the positive part of a: p * low + (a - p) * up = a * up + p * (low - up), and likewise for the shifts.
    Rounding leaves the slope of a line off by at most 4 u, which costs 4 u |a| |z|.
    """
    a = c.values
    positive = a.clamp(min=0)
    if given is None:
        bend = seen(lines.lower_slope - lines.upper_slope, c)
    elif c.window is None:
        bend = given - lines.upper_slope[:, None]
    else:  # on windows, the slopes of a map are shared by its rows
        bend = seen(given[:, 0] - lines.upper_slope, c)
    carried = torch.addcmul(aligned(a, c) * seen(lines.upper_slope, c), aligned(positive, c), bend)
    added = _negative_dot(c, positive, lines.upper_shift)
    if lines.lower_shift is not None:
        added = added + dot(positive, c, lines.lower_shift)
    if sound:
        size = torch.maximum(before[0].abs(), before[1].abs())
        shifts = (
            lines.upper_shift.abs()
            if lines.lower_shift is None
            else torch.maximum(lines.upper_shift.abs(), lines.lower_shift.abs())
        )
        cost = 8 * unit(a.dtype) * size + 4 * gamma(a[0, 0].numel(), a.dtype) * shifts
        added = added + _negative_dot(c, positive, cost, times=2)
    return [Coefficients(carried.view_as(a), c.window, c.places)], added


def _negative_dot(c: Coefficients, positive: Tensor, v: Tensor, times: int = 1) -> Tensor:
    """<a - times * p, v> for every row, (B, M), with p the positive part of the coefficients a.

    Its negative part for times = 1, minus its absolute values for times = 2. Dense rows: two products with a vector are
    cheaper than one more tensor. Windows: one look-up is cheaper than two.
    """
    if c.window is None:
        return dot(c.values, c, v) - times * dot(positive, c, v)
    return dot(torch.sub(c.values, positive, alpha=times), c, v)


def _concat(graph: Graph, node: Node, op: ops.Concat, c: Coefficients) -> list[Coefficients]:
    sizes = [graph.nodes[k].shape[op.dim - 1] for k in node.inputs]
    if c.window is not None and op.dim == 1:
        return [c.with_values(part) for part in c.values.split(sizes, 2)]
    return [Coefficients(part) for part in dense(c, node.shape).split(sizes, op.dim + 1)]


def _max_pool(op: ops.MaxPool, a: Tensor, lower: Tensor, upper: Tensor, *, sound: bool) -> Step:
    """Lines below and above a maximum.

    Below: the value with the largest lower bound. Above: the same if no other can exceed it, else a constant, the
    largest upper bound.
    """
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
    """Largest upper bound in each window other than that of the neuron `index`."""
    number = torch.arange(1, upper[0, 0].numel() + 1, device=upper.device).view(1, 1, *upper.shape[2:])
    span = [op.dilation[i] * (op.kernel[i] - 1) + 1 for i in range(2)]
    spare = [op.padding[i] + op.stride[i] + span[i] for i in range(2)]  # ceil_mode may reach beyond the padding
    pads = (op.padding[1], spare[1], op.padding[0], spare[0])

    def windows(v: Tensor, fill: float) -> Tensor:
        steps = F.pad(v, pads, value=fill).unfold(2, span[0], op.stride[0]).unfold(3, span[1], op.stride[1])
        return steps[:, :, : out[0], : out[1], :: op.dilation[0], :: op.dilation[1]]

    own = windows(number, 0) == (index + 1)[..., None, None]
    return windows(upper, -torch.inf).masked_fill(own, -torch.inf).flatten(4).amax(4)


def _min_max(node: Node, c: Coefficients, lower: Tensor, upper: Tensor, *, sound: bool) -> Step:
    """max(a, b) = b + relu(a - b) and min(a, b) = a - relu(a - b), with ReLU's lines for a - b."""
    lower, upper = lower.unflatten(1, (-1, 2)), upper.unflatten(1, (-1, 2))
    gap = (lower[:, :, 0] - upper[:, :, 1], upper[:, :, 0] - lower[:, :, 1])
    if sound:
        gap = interval.widen(*gap, ulps=2)
    lines = relax(ops.Activation("relu", torch.relu), *gap, "adaptive", node.name)
    a_max, a_min = c.values.unflatten(2, (-1, 2)).unbind(3)
    half = c.with_values(a_max)
    shape, a_max, a_min = a_max.shape, aligned(a_max, half), aligned(a_min, half)
    low, up = seen(lines.lower_slope, half), seen(lines.upper_slope, half)
    # The coefficient of relu(a - b) is a_max in the maximum and -a_min in the minimum.
    s_max, s_min = torch.where(a_max > 0, low, up), torch.where(a_min < 0, low, up)
    first = a_max * s_max + a_min * (1 - s_min)
    second = a_max * (1 - s_max) + a_min * s_min
    added = dot((a_max.clamp(max=0) - a_min.clamp(min=0)).view(shape), half, lines.upper_shift)
    if sound:
        added = added - 2 * gamma(2 * c.values[0, 0].numel(), added.dtype) * added.abs()
    return [c.with_values(torch.stack([first.view(shape), second.view(shape)], 3).flatten(2, 3))], added
