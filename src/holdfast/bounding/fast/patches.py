"""Interval bounds for patches: the leading layers are bounded only where a patch reaches.

Outside the receptive field of the patch every layer has the value that it has at the input x itself. A layer is
therefore described by a window: the shift of the centre from the value at x, and the radius. Both are zero outside, so
a convolution of the window is a small convolution with zero padding; an activation needs the value at x, cut out where
the window lies. A dense first layer multiplies only the columns of the pixels under the patch. The bounds equal the
bounds of `interval.propagate` up to rounding, which they do not account for: they are for training.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounding import interval
from holdfast.bounding.core.placements import mixing_layer
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, evaluate
from holdfast.errors import UnsupportedError
from holdfast.threats import Patch
from holdfast.utils.reference import is_reference

Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Frame:
    """Where windows lie in the maps of one layer: along each axis at start + step * cell, `size` long.

    A cell of the input is as long as the strides of all windowed layers together, so that the windows of all cells look
    alike. Windows may reach beyond the maps.
    """

    start: Pair
    size: Pair
    step: Pair

    def positions(self, axis: int, cells: Tensor) -> Tensor:
        """Along an axis of the maps, for windows in the cells (N, 2), shape (N, size)."""
        first = self.start[axis] + self.step[axis] * cells[:, axis, None]
        return first + torch.arange(self.size[axis], device=cells.device)

    def within(self, low: Tensor, high: Tensor, cells: Tensor) -> Tensor:
        """Which values of the windows lie in the rectangles low <= position < high (N or 1, 2), bool (N, 1, h, w)."""
        rows, columns = (
            (at := self.positions(axis, cells)).ge(low[:, axis, None]) & at.lt(high[:, axis, None]) for axis in (0, 1)
        )
        return (rows[:, :, None] & columns[:, None])[:, None]

    def cut(self, maps: Tensor, cells: Tensor) -> Tensor:
        """The windows of maps (B, C, H, W), N / B of each, shape (N, C, h, w); arbitrary beyond the maps."""
        down, across = (self.positions(axis, cells).clamp(0, maps.shape[2 + axis] - 1) for axis in (0, 1))
        index = (down[:, :, None] * maps.shape[3] + across[:, None]).view(len(maps), 1, -1)
        found = maps.flatten(2).gather(2, index.expand(-1, maps.shape[1], -1))
        windows: Tensor = found.unflatten(2, (-1, *self.size)).transpose(1, 2).flatten(0, 1)
        return windows

    def place(self, windows: Tensor, shape: ops.Shape, cells: Tensor) -> Tensor:
        """Maps of `shape` (C, H, W) that hold the windows (N, C, h, w) and are zero elsewhere, (N, C, H, W)."""
        (height, width), corner = self.size, (self.positions(axis, cells)[:, :1] for axis in (0, 1))
        down, across = (
            torch.arange(size, device=cells.device) - at for size, at in zip(shape[1:], corner, strict=True)
        )
        hit = (down.ge(0) & down.lt(height))[:, :, None] & (across.ge(0) & across.lt(width))[:, None]
        # One value more than the window has, a zero, stands for everything outside.
        index = torch.where(hit, down[:, :, None] * width + across[:, None], height * width)
        index = index.flatten(1)[:, None].expand(-1, shape[0], -1)
        return F.pad(windows.flatten(2), (0, 1)).gather(2, index).view(len(cells), *shape)


def margin_bounds(
    graph: Graph, x: Tensor, y: Tensor, threat: Patch, corners: Tensor, reach: float, *, again: int = 1
) -> Tensor:
    """Lower bounds of z_y - z_j for every class j and group of patches, shape (B, n, K); zero at j = y.

    Bound pooling: each p / again patches in a row are merged after the first layer, that is the box around their boxes
    goes on; the `again` boxes of a group are merged after the second layer.

    Args:
        graph: the network.
        x: inputs (B, C, H, W).  y: labels (B,).
        threat: the patch.
        corners: top-left corners (row, column) of n groups of p patches for each input, (B, n, p, 2).
        reach: largest change of a value under the patch.
        again: a divisor of p.
    """
    count, sizes = corners.shape[1], [corners.shape[2] // again, again]
    dense = 0 if is_reference() else _dense_layer(graph)
    last = dense or (0 if is_reference() else _windowed(graph))
    if dense:
        lower, upper = _dense_bounds(graph.nodes[dense].op, x, threat, corners, reach)
        size = sizes.pop(0)
        lower, upper = _union(lower, upper, size)
    else:
        lower, upper = _window_bounds(graph, last, x, threat, corners, reach, sizes)
    rest = graph.after(last)
    while max(sizes, default=1) > 1:
        first = mixing_layer(rest)
        if first == len(rest.nodes) - 1:
            raise UnsupportedError(
                "bound pooling needs layers that all later ones build on, before the last; pool less"
            )
        lower, upper = interval.output_bounds(Graph(rest.nodes[: first + 1]), lower, upper, sound=False)
        lower, upper = _union(lower, upper, sizes.pop(0))
        rest = rest.after(first)
    margins = interval.margin_bounds(rest, lower, upper, y.repeat_interleave(count), sound=False)
    return margins.view(len(x), count, -1)


def _dense_layer(graph: Graph) -> int:
    """The node of a dense layer that reads the flat input and that all others build on; 0 if there is none."""
    flat = len(graph.nodes) > 2 and isinstance(graph.nodes[1].op, ops.Reshape) and graph.nodes[2].inputs == (1,)
    alone = all(j >= 2 for node in graph.nodes[3:] for j in node.inputs)
    return 2 if flat and alone and isinstance(graph.nodes[2].op, ops.Linear) and len(graph.nodes) > 3 else 0


def _dense_bounds(op: ops.Op, x: Tensor, threat: Patch, corners: Tensor, reach: float) -> interval.Interval:
    """W x + b + W_l (m - x)_l -+ abs(W_l) r_l over the pixels l of each patch, (B * n * p, M) each.

    m and r are the middle and the radius of the box. If all inputs have the same corners, each W_l is read once.
    """
    assert isinstance(op, ops.Linear)
    channels, height, width = x.shape[1:]
    rows = corners[..., 0, None] + torch.arange(threat.height, device=x.device)
    columns = corners[..., 1, None] + torch.arange(threat.width, device=x.device)
    plane = torch.arange(channels, device=x.device)[:, None, None] * height
    index = (plane + rows[..., None, :, None]) * width + columns[..., None, None, :]  # (B, n, p, C, h, w)
    index = index.flatten(3).flatten(1, 2)  # (B, n p, C h w)
    point = x.flatten(1)[:, None].expand(-1, index.shape[1], -1).gather(2, index)
    lower, upper = (point - reach).clamp(min=threat.low), (point + reach).clamp(max=threat.high)
    shift, radius = (lower + upper) / 2 - point, (upper - lower) / 2
    shared = corners.stride(0) == 0 or len(x) == 1
    weight = op.weight.T[index[0] if shared else index]  # (n p, C h w, M), or one for each input

    def apply(values: Tensor, weight: Tensor) -> Tensor:
        if shared:
            return (values.transpose(0, 1) @ weight).transpose(0, 1)
        return (values[:, :, None] @ weight).squeeze(2)

    centre = op.apply(x.flatten(1))[:, None] + apply(shift, weight)
    radius = apply(radius, weight.abs())
    return (centre - radius).flatten(0, 1), (centre + radius).flatten(0, 1)


def _union(lower: Tensor, upper: Tensor, size: int) -> interval.Interval:
    """The boxes around `size` boxes each, (N * size, ...) -> (N, ...)."""
    return lower.unflatten(0, (-1, size)).amin(1), upper.unflatten(0, (-1, size)).amax(1)


def _windowed(graph: Graph) -> int:
    """The last node of the chain of convolutions, scalings and activations that windows pass through."""
    last = 0
    for i, node in enumerate(graph.nodes[1:], start=1):
        chained = node.inputs == (i - 1,) and len(node.shape) == 3
        if not chained or not isinstance(node.op, ops.Conv | ops.Scale | ops.Activation):
            break
        if isinstance(node.op, ops.Scale) and not ops.is_per_channel(node.op.factor, node.shape[0]):
            break
        if all(j >= i for later in graph.nodes[i + 1 :] for j in later.inputs):
            last = i
    return last


def _window_bounds(
    graph: Graph, last: int, x: Tensor, threat: Patch, corners: Tensor, reach: float, sizes: list[int]
) -> interval.Interval:
    """Bounds of the node `last` on whole maps, (B * n * p, *shape) each.

    Each convolution takes the next number from `sizes` and merges as many boxes in a row.
    """
    size = corners.shape[2]
    convs = [node.op for node in graph.nodes[: last + 1] if isinstance(node.op, ops.Conv)]
    step = (math.prod(c.stride[0] for c in convs), math.prod(c.stride[1] for c in convs))
    apart = (corners.amax(2) - corners.amin(2)).flatten(0, 1).amax(0).tolist()
    frame = Frame((0, 0), (threat.height + apart[0] + step[0] - 1, threat.width + apart[1] + step[1] - 1), step)
    cells = (corners.amin(2).flatten(0, 1) // corners.new_tensor(step)).repeat_interleave(size, 0)
    corners = corners.flatten(0, 2)
    point = frame.cut(x, cells)
    free = frame.within(corners, corners + corners.new_tensor([threat.height, threat.width]), cells)
    lower = torch.where(free, (point - reach).clamp(min=threat.low), point)
    upper = torch.where(free, (point + reach).clamp(max=threat.high), point)
    shift, radius, values = (lower + upper) / 2 - point, (upper - lower) / 2, x
    for node in graph.nodes[1 : last + 1]:
        match node.op:
            case ops.Conv():
                shift, radius, frame = _convolve(node.op, shift, radius, frame)
                if sizes and (size := sizes.pop(0)) > 1:
                    lower, upper = _union(shift - radius, shift + radius, size)
                    shift, radius, cells = (lower + upper) / 2, (upper - lower) / 2, cells[::size]
                edge = corners.new_tensor(node.shape[1:])[None]
                beyond = ~frame.within(torch.zeros_like(edge), edge, cells)
                shift, radius = shift.masked_fill(beyond, 0), radius.masked_fill(beyond, 0)
            case ops.Scale():
                shift, radius = node.op.factor * shift, node.op.factor.abs() * radius
            case ops.Activation():
                point = frame.cut(values, cells)
                low, high = node.op.ends(point + shift - radius, point + shift + radius)
                shift, radius = (low + high) / 2 - node.op.function(point), (high - low) / 2
        values = evaluate(node.op, [values])
    shape = graph.nodes[last].shape
    centre = values.repeat_interleave(len(cells) // len(x), 0) + frame.place(shift, shape, cells)
    radius = frame.place(radius, shape, cells)
    return centre - radius, centre + radius


def _convolve(conv: ops.Conv, shift: Tensor, radius: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Frame]:
    """Shift and radius after a convolution, in the frame of the outputs that can change."""
    start, size, pads = [], [], []
    for i in (0, 1):
        kernel, stride = conv.dilation[i] * (conv.weight.shape[2 + i] - 1) + 1, conv.stride[i]
        reached = frame.start[i] + conv.padding[i]  # output o reads the inputs o * stride ... o * stride + kernel - 1
        first, last = -((kernel - 1 - reached) // stride), (reached + frame.size[i] - 1) // stride
        front = reached - first * stride
        start.append(first)
        size.append(last - first + 1)
        pads.append((front, (last - first) * stride + kernel - front - frame.size[i]))
    step = (frame.step[0] // conv.stride[0], frame.step[1] // conv.stride[1])

    def apply(values: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(F.pad(values, pads[1] + pads[0]), weight, None, conv.stride, 0, conv.dilation, conv.groups)

    after = Frame((start[0], start[1]), (size[0], size[1]), step)
    return apply(shift, conv.weight), apply(radius, conv.weight.abs()), after
