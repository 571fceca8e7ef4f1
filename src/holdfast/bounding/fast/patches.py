"""Interval bounds for patches: leading convolutions are bounded only in a window around each patch.

Outside the receptive field of the patch every layer has the value that it has at the input x itself. A layer is
therefore described by a window: the shift of the centre from the value at x, and the radius. Both are zero outside, so
a convolution of the window is a small convolution with zero padding; an activation needs the value at x, cut out where
the window lies. The bounds equal the bounds of `interval.propagate` up to rounding, which they do not account for:
they are for training.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounding import interval
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


def margin_bounds(graph: Graph, x: Tensor, y: Tensor, threat: Patch, corners: Tensor, reach: float) -> Tensor:
    """Lower bounds of z_y - z_j for every class j and group of patches, shape (B, n, K); zero at j = y.

    After the first layer, the union of the boxes of a group goes on (bound pooling).

    Args:
        graph: the network.
        x: inputs (B, C, H, W).  y: labels (B,).
        threat: the patch.
        corners: top-left corners (row, column) of n groups of p patches for each input, (B, n, p, 2).
        reach: largest change of a value under the patch.
    """
    count, size = corners.shape[1:3]
    last = 0 if is_reference() else _windowed(graph)
    lower, upper = _window_bounds(graph, last, x, threat, corners, reach)
    rest = graph.after(last)
    if len(lower) > len(x) * count:
        mixes = ops.Linear | ops.Conv if is_reference() else ops.Linear  # else convolutions are in the windows
        first = next((i for i, node in enumerate(rest.nodes) if isinstance(node.op, mixes)), len(rest.nodes))
        if any(j < first for node in rest.nodes[first + 1 :] for j in node.inputs) or first >= len(rest.nodes) - 1:
            raise UnsupportedError("bound pooling needs a network whose first layer all others build on; use pool = 1")
        lower, upper = interval.output_bounds(Graph(rest.nodes[: first + 1]), lower, upper, sound=False)
        lower, upper = _union(lower, upper, size)
        rest = rest.after(first)
    margins = interval.margin_bounds(rest, lower, upper, y.repeat_interleave(count), sound=False)
    return margins.view(len(x), count, -1)


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
        if all(j >= i for later in graph.nodes[i + 1 :] for j in later.inputs):
            last = i
    return last


def _window_bounds(
    graph: Graph, last: int, x: Tensor, threat: Patch, corners: Tensor, reach: float
) -> interval.Interval:
    """Bounds of the node `last` on whole maps, (B * n, *shape) each; (B * n * p, *shape) if no layer came yet."""
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
                if size > 1:
                    lower, upper = _union(shift - radius, shift + radius, size)
                    shift, radius, cells, size = (lower + upper) / 2, (upper - lower) / 2, cells[::size], 1
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
