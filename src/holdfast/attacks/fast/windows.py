"""Evaluate a convolutional network again after a small window of its input has changed.

A change of a window reaches few values of the first layers: only these are computed anew, out of maps of every layer
that are kept for each input. Random search, which tries thousands of small windows, then costs a fraction of the full
passes. The values equal a full pass up to rounding; nothing adds up over the steps, since a patch is computed
from the maps and not from differences.

Maps lie channels last, (B, H, W, C), with the padding of the next convolution around them: a patch is then a choice of
rows of C values, and the convolution of a patch needs no copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.bounding.graph.ops import (
    Activation,
    Conv,
    Graph,
    Linear,
    Node,
    Op,
    Reshape,
    Scale,
    evaluate,
    is_per_channel,
)
from holdfast.bounding.graph.trace import trace
from holdfast.errors import HoldfastError
from holdfast.utils.reference import is_reference

_WORTH = 2e5  # multiplications of a full pass per input; below, the bookkeeping costs more than it spares
_WHOLE = 0.7  # share of a map above which it is computed as a whole
_SMALL = 16  # outputs of a patch up to which a matrix product is faster than a convolution

Pair = tuple[int, int]
Spot = tuple[Tensor, Tensor]
"""Upper left corners of patches, one (B,) for each axis."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """A convolution (batch norm folded in), the activations behind it, and the size of its output."""

    conv: Conv
    after: tuple[Activation, ...]
    size_out: Pair

    @cached_property
    def matrix(self) -> Tensor:
        """The kernel as a matrix (kh * kw * C, C')."""
        return self.conv.weight.permute(2, 3, 1, 0).flatten(0, 2).contiguous()

    def reached(self, window: Pair) -> Pair:
        """Most outputs that a window of the input reaches, along each axis."""
        ends = zip(window, self.conv.weight.shape[2:], self.conv.stride, self.size_out, strict=True)
        rows, columns = (min((n + k - 2) // s + 1, size) for n, k, s, size in ends)
        return rows, columns

    def start(self, corner: Spot, reached: Pair) -> Spot:
        """Corners of the outputs that windows at `corner` of the input reach, moved so that all lie in the map."""
        conv = self.conv
        first, second = (
            torch.clamp(-((k - 1 - p - a) // s), 0, size - n)
            for a, p, k, s, n, size in zip(
                corner, conv.padding, conv.weight.shape[2:], conv.stride, reached, self.size_out, strict=True
            )
        )
        return first, second

    def apply(self, padded: Tensor) -> Tensor:
        """Outputs (B, h, w, C') of a map or a patch (B, H, W, C) that has its padding."""
        conv = self.conv
        weight = conv.weight.contiguous(memory_format=torch.channels_last)
        y = F.conv2d(padded.permute(0, 3, 1, 2), weight, conv.bias, conv.stride)
        return self._activate(y.permute(0, 2, 3, 1))

    def _activate(self, y: Tensor) -> Tensor:
        for op in self.after:
            y = op.function(y)
        return y

    def patch(self, values: Tensor, spot: Spot, size: Pair) -> Tensor:
        """Outputs at patches of `size` at `spot`, of a padded map (B, H, W, C): one row of C' values each."""
        kernel, stride = (self.conv.weight.shape[2], self.conv.weight.shape[3]), self.conv.stride
        begin, flat = (spot[0] * stride[0], spot[1] * stride[1]), values.flatten(0, 2)
        if size[0] * size[1] > _SMALL:
            seen = ((size[0] - 1) * stride[0] + kernel[0], (size[1] - 1) * stride[1] + kernel[1])
            rows = _rows(values.shape, begin, _offsets(values.shape[2], seen, (1, 1), (1, 1), values.device))
            return self.apply(flat.index_select(0, rows).view(len(values), *seen, -1)).flatten(0, 2)
        rows = _rows(values.shape, begin, _offsets(values.shape[2], size, stride, kernel, values.device))
        columns = flat.index_select(0, rows).view(-1, len(self.matrix))
        bias = self.conv.bias
        return self._activate(columns @ self.matrix if bias is None else torch.addmm(bias, columns, self.matrix))


def _pad(values: Tensor, padding: Pair) -> Tensor:
    """(B, H, W, C) with zeros around."""
    return F.pad(values, (0, 0, padding[1], padding[1], padding[0], padding[0])).contiguous()


@lru_cache(maxsize=256)
def _offsets(width: int, size: Pair, stride: Pair, kernel: Pair, device: torch.device) -> Tensor:
    """Places, relative to a corner, of the values under the kernel at each of the outputs of a patch; flat."""
    steps = [torch.arange(n, device=device) * s for n, s in zip(size, stride, strict=True)]
    taps = [torch.arange(k, device=device) for k in kernel]
    rows = (steps[0][:, None, None, None] + taps[0][:, None]) * width
    return (rows + steps[1][:, None, None] + taps[1]).flatten()


def _rows(shape: torch.Size, corner: Spot, offsets: Tensor) -> Tensor:
    """Positions among the rows of C values of a map (B, H, W, C): `offsets` from the corner of each input, flat."""
    batch, height, width, _ = shape
    first = torch.arange(0, batch * height * width, height * width, device=offsets.device)
    return (first.add_(corner[0] * width).add_(corner[1])[:, None] + offsets).flatten()


def _patch(size: Pair, width: int, device: torch.device) -> Tensor:
    """Offsets of the values of a patch themselves."""
    return _offsets(width, size, (1, 1), (1, 1), device)


@dataclass(eq=False)
class _Change:
    """What a proposal overwrote in one map: where, and what was there."""

    map: Tensor
    rows: Tensor
    old: Tensor


class Windows:
    """A network that is evaluated where its input changed; `windowed` makes one for models that it suits."""

    def __init__(self, before: tuple[Op, ...], layers: list[_Layer], head: Callable[[int, Tensor], Tensor]) -> None:
        self._before, self._layers, self._head = before, layers, head
        self._maps: list[Tensor] = []  # inputs of the layers, and the output of the last one that is kept
        self.depth, self._size = 0, (0, 0)  # layers that are evaluated in parts, for windows of this size
        self._changes: list[_Change] = []

    def local(self, size: Pair) -> int:
        """How many layers a window of this size leaves mostly untouched."""
        depth = 0
        for layer in self._layers:
            size = layer.reached(size)
            if size[0] * size[1] > _WHOLE * layer.size_out[0] * layer.size_out[1]:
                break
            depth += 1
        return depth

    def _first(self, x: Tensor) -> Tensor:
        for op in self._before:
            x = evaluate(op, [x])
        return _pad(x.permute(0, 2, 3, 1), self._layers[0].conv.padding)

    def start(self, best: Tensor, size: Pair) -> None:
        """Make the maps of the inputs `best` (B, C, H, W) that windows of this size need."""
        self.depth, self._size = self.local(size), size
        self._maps, self._changes = [], []
        if self.depth == 0:
            return
        values = self._first(best)
        for i, layer in enumerate(self._layers[: self.depth]):
            self._maps.append(values)
            values = layer.apply(values)
            last = i + 1 == len(self._layers)
            values = values.contiguous() if last else _pad(values, self._layers[i + 1].conv.padding)
        self._maps.append(values)

    def select(self, rows: Tensor) -> None:
        """Go on with these inputs."""
        self._maps = [values[rows] for values in self._maps]

    def propose(self, window: Tensor, corner: Tensor) -> Tensor:
        """Logits (B, K) of `best` with other values (B, C, h, w) in the window at `corner` (B, 2); see `settle`."""
        spot: Spot = (corner[:, 0], corner[:, 1])
        self._changes = []
        for op in self._before:
            window = evaluate(op, [window])
        self._write(0, window.permute(0, 2, 3, 1).flatten(0, 2), spot, self._size)
        size = self._size
        for i, layer in enumerate(self._layers[: self.depth]):
            reached = layer.reached(size)
            spot, size = layer.start(spot, reached), reached
            self._write(i + 1, layer.patch(self._maps[i], spot, size), spot, size)
        return self._head(self.depth, self._maps[self.depth])

    def _write(self, i: int, new: Tensor, spot: Spot, size: Pair) -> None:
        """Put the rows of patches into a map, and note what was there. Maps have the padding of their reader."""
        values = self._maps[i]
        padding = self._layers[i].conv.padding if i < len(self._layers) else (0, 0)
        offsets = _patch(size, values.shape[2], values.device)
        rows = _rows(values.shape, (spot[0] + padding[0], spot[1] + padding[1]), offsets)
        flat = values.flatten(0, 2)
        self._changes.append(_Change(values, rows, flat.index_select(0, rows)))
        flat.index_copy_(0, rows, new)

    def settle(self, rejected: Tensor) -> None:
        """Take the proposal back for the inputs with these indices."""
        for change in self._changes:
            count = len(change.map)
            rows = change.rows.view(count, -1)[rejected].flatten()
            old = change.old.view(count, -1)[rejected].view(-1, change.map.shape[-1])
            change.map.flatten(0, 2).index_copy_(0, rows, old)
        self._changes = []


def windowed(model: nn.Module, x: Tensor) -> Windows | None:
    """Make `Windows` of the model for inputs like x (B, C, H, W); None if that is impossible or does not pay.

    It can be done where the network begins with a chain of convolutions and operations on each value.
    """
    if is_reference() or x.ndim != 4 or not isinstance(model, nn.Module):
        return None
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return None  # these see the passes of the model, and tracing does not see them
    try:
        graph = trace(model, x)
    except HoldfastError:
        return None
    return _split(graph)


def _pointwise(node: Node) -> bool:
    """True if the operation treats all places of a map alike."""
    if isinstance(node.op, Scale):
        return all(is_per_channel(t, node.shape[0]) for t in (node.op.factor, node.op.shift))
    return isinstance(node.op, Activation)


def _split(graph: Graph) -> Windows | None:
    nodes = graph.nodes
    if any(node.inputs != (i,) for i, node in enumerate(nodes[1:])):
        return None  # not a chain
    at, before = 1, []
    while at < len(nodes) and _pointwise(nodes[at]):
        before.append(nodes[at].op)
        at += 1
    layers: list[_Layer] = []
    while at < len(nodes):
        conv = nodes[at].op
        if not isinstance(conv, Conv) or conv.dilation != (1, 1) or conv.groups != 1:
            break
        shape, at, after = nodes[at].shape, at + 1, list[Activation]()
        while at < len(nodes) and len(nodes[at].shape) == 3 and _pointwise(nodes[at]):
            op = nodes[at].op
            if isinstance(op, Scale) and after:
                break
            if isinstance(op, Scale):
                conv = _folded(conv, op)
            elif isinstance(op, Activation):
                after.append(op)
            at += 1
        layers.append(_Layer(conv, tuple(after), (shape[1], shape[2])))
    work = sum(layer.conv.weight.numel() * layer.size_out[0] * layer.size_out[1] for layer in layers)
    if not layers or work < _WORTH:
        return None
    return Windows(tuple(before), layers, partial(_head, layers, nodes[at:], _dense_first(nodes, at)))


def _folded(conv: Conv, scale: Scale) -> Conv:
    """The convolution with a factor and a shift for each channel behind it."""
    factor, shift = (t.flatten().expand(len(conv.weight)) for t in (scale.factor, scale.shift))
    bias = shift if conv.bias is None else conv.bias * factor + shift
    return replace(conv, weight=conv.weight * factor[:, None, None, None], bias=bias)


def _dense_first(nodes: tuple[Node, ...], at: int) -> Linear | None:
    """Where a dense layer reads the flattened last map: this layer, for channels last."""
    if at + 1 >= len(nodes) or not isinstance(nodes[at].op, Reshape) or not isinstance(nodes[at + 1].op, Linear):
        return None
    dense, shape = nodes[at + 1].op, nodes[at - 1].shape
    if len(nodes[at].shape) != 1 or not isinstance(dense, Linear):
        return None
    weight = dense.weight.view(-1, *shape).permute(0, 2, 3, 1).flatten(1).contiguous()
    return replace(dense, weight=weight)


def _head(layers: list[_Layer], nodes: tuple[Node, ...], dense: Linear | None, depth: int, values: Tensor) -> Tensor:
    """Logits (B, K) from the map behind `depth` layers, which has the padding of the next one."""
    for i in range(depth, len(layers)):
        if i > depth:
            values = _pad(values, layers[i].conv.padding)
        values = layers[i].apply(values)
    values = values.permute(0, 3, 1, 2).contiguous() if dense is None else dense.apply(values.flatten(1))
    for node in nodes if dense is None else nodes[2:]:
        values = evaluate(node.op, [values])
    return values
