"""Convolutions with a gradient for the input that is fast on a CPU: of one to four channels, and with kernels of 4x4.

oneDNN works on blocks of eight channels, so that the gradient for a grey image costs it eight times what it should. And
with an even kernel it is quicker at a convolution with the kernel turned round than at the gradient, which is the same.
"""

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.utils.reference import is_reference

_ONE = (1, (1, 1), [1, 1])
CACHE = 1 << 19
"""Numbers that stay in a cache of the second level."""


class FoldedConvolution(torch.autograd.Function):
    """conv2d with constant weights; the gradient for its input is a matrix product and a sum of shifts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, stride, padding, dilation = inputs
        ctx.save_for_backward(weight)
        ctx.shape, ctx.geometry, ctx.channels_last = x.shape, (stride, padding, dilation), _channels_last(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        folded = _folded(gradients[0], ctx.shape, weight, *ctx.geometry, channels_last=ctx.channels_last)
        return folded, None, None, None, None, None


class TurnedConvolution(torch.autograd.Function):
    """conv2d at stride 1 with constant weights; the gradient for its input is a convolution with the kernel turned."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> Tensor:
        return F.conv2d(x, weight, bias, padding=padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.padding = inputs[3]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return _turned(gradients[0], weight, ctx.padding), None, None, None


def _channels_last(x: Tensor) -> bool:
    return x.stride(1) == 1 < x.shape[1]


def _folded(
    gradient: Tensor,
    shape: torch.Size,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    *,
    channels_last: bool,
) -> Tensor:
    """The gradient for the input, of `shape`, from the gradient for the output (B, out, h, w)."""
    if stride in _ONE:
        taps = weight.permute(2, 3, 1, 0)
        columns = taps.flatten(0, 2) @ gradient.flatten(2)
        columns = columns.view(len(columns), *taps.shape[:3], *gradient.shape[2:])
        return _add_up(columns, shape, dilation, padding)
    taps = _by_phase(_spread(weight, *_pair(dilation)), *_pair(stride))
    if channels_last:
        return _shuffle(gradient, taps, shape[-2:], _pair(padding))
    size = math.prod(taps.shape[:5]) * gradient.shape[2] * gradient.shape[3]
    chunks = gradient.split(max(1, CACHE // size))
    parts = [_interleave(chunk, taps, shape[-2:], _pair(padding)) for chunk in chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _turned(gradient: Tensor, weight: Tensor, padding: Any) -> Tensor:
    around = [size - 1 - pad for size, pad in zip(weight.shape[2:], _pair(padding), strict=True)]
    return F.conv2d(gradient, weight.transpose(0, 1).flip(2, 3), padding=around)


def _add_up(columns: Tensor, shape: torch.Size, dilation: Any, padding: Any) -> Tensor:
    """A fold at stride 1, of columns (B, kh, kw, C, h, w) to `shape`: by rows, where `fold` goes value by value."""
    (below, beside), (top, left) = _pair(dilation), _pair(padding)
    height, width = columns.shape[-2:]
    total = columns.new_zeros(*shape[:2], shape[2] + 2 * top, shape[3] + 2 * left)
    for i, line in enumerate(columns.unbind(1)):
        for j, column in enumerate(line.unbind(1)):
            total[:, :, i * below : i * below + height, j * beside : j * beside + width] += column
    return total[:, :, top : top + shape[2], left : left + shape[3]].contiguous()


def _pair(n: Any) -> tuple[int, int]:
    return (n, n) if isinstance(n, int) else (n[0], n[1])


def _spread(weight: Tensor, below: int, beside: int) -> Tensor:
    """The kernel of a dilated convolution with its gaps written out as zeros."""
    rows, columns = ((n - 1) * gap + 1 for n, gap in zip(weight.shape[2:], (below, beside), strict=True))
    whole = weight.new_zeros(*weight.shape[:2], rows, columns)
    whole[:, :, ::below, ::beside] = weight
    return whole


def _by_phase(weight: Tensor, s: int, t: int) -> Tensor:
    """Taps (K, L, C, s, t, out): tap s q + r of the kernel moves a gradient by q places, to the pixels s i + r."""
    rows, columns = -(-weight.shape[2] // s), -(-weight.shape[3] // t)
    whole = F.pad(weight, (0, columns * t - weight.shape[3], 0, rows * s - weight.shape[2]))
    return whole.view(*weight.shape[:2], rows, s, columns, t).permute(2, 4, 1, 3, 5, 0)


def _interleave(gradient: Tensor, taps: Tensor, size: torch.Size, padding: tuple[int, int]) -> Tensor:
    """The gradient for the input (B, C, *size) of a strided convolution, from that for its output (B, out, h, w).

    A matrix product for each input, whose results still lie in the cache when they are added up.
    """
    (rows, columns), phases, (batch, _, height, width) = taps.shape[:2], taps.shape[2:5], gradient.shape
    moved = (taps.flatten(0, 4) @ gradient.flatten(2)).view(batch, rows, columns, -1, height, width)
    total = gradient.new_zeros(batch, moved.shape[3], height + rows - 1, width + columns - 1)
    for q in range(rows):
        for u in range(columns):
            total[:, :, q : q + height, u : u + width] += moved[:, q, u]
    return _cut(total.unflatten(1, phases).permute(0, 1, 4, 2, 5, 3).flatten(4).flatten(2, 3), size, padding)


def _shuffle(gradient: Tensor, taps: Tensor, size: torch.Size, padding: tuple[int, int]) -> Tensor:
    """As `_interleave`, for maps with channels last: oneDNN is quick at stride 1, where the phases are channels."""
    rows, columns, channels, s, t, _ = taps.shape
    kernel = taps.permute(3, 4, 2, 5, 0, 1).flatten(0, 2).flip(2, 3).contiguous(memory_format=torch.channels_last)
    total = F.conv2d(gradient, kernel, padding=(rows - 1, columns - 1)).permute(0, 2, 3, 1)
    pixels = total.unflatten(3, (s, t * channels)).transpose(2, 3)  # (B, i, r, j, pixels of row s i + r)
    return _cut(pixels.flatten(3).flatten(1, 2).unflatten(2, (-1, channels)).permute(0, 3, 1, 2), size, padding)


def _cut(pixels: Tensor, size: torch.Size, padding: tuple[int, int]) -> Tensor:
    """The image of that size inside its padding; zeros where no tap reaches."""
    short = [max(0, padding[i] + size[i] - pixels.shape[2 + i]) for i in range(2)]
    if any(short):
        pixels = F.pad(pixels, (0, short[1], 0, short[0]))
    return pixels[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


# `apply` asks for the signature at every call; read once, it takes a third of the time.
for _forward in (FoldedConvolution.forward, TurnedConvolution.forward):
    _forward.__signature__ = inspect.signature(_forward)  # type: ignore[union-attr]


def _way(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> str:
    """Which gradient for x is the fastest: "folded", "turned" or torch's own, ""."""
    by_onednn = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if is_reference() or not by_onednn or x.ndim != 4 or len(x) == 0 or groups > 1 or isinstance(padding, str):
        return ""
    # The columns of the product then take little more memory than the layer's output, and the fold does not lose what
    # the product gains; with a stride it has less to do.
    strided = stride not in _ONE
    if weight.shape[1] <= 4 and weight[0].numel() <= len(weight) * (3 if strided else 1):
        return "folded"
    # 16 to 32 channels, maps of 12x12 to 32x32: 0.7 to 0.8 of the time; with more channels, or 3x3, no gain.
    even = tuple(weight.shape[2:]) == (4, 4) and 4 < weight.shape[1] <= 16 and not strided and dilation in _ONE
    return "turned" if even and max(_pair(padding)) < 4 else ""


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As torch's, but where the weights are constant, with the fast gradient of this file if there is one."""
    constant = not weight.requires_grad and (bias is None or not bias.requires_grad)
    way = _way(input, weight, stride, padding, dilation, groups) if input.requires_grad and constant else ""
    if way == "folded":
        folded: Tensor = FoldedConvolution.apply(input, weight, bias, stride, padding, dilation)  # type: ignore[no-untyped-call]
        return folded
    if way == "turned":
        turned: Tensor = TurnedConvolution.apply(input, weight, bias, padding)  # type: ignore[no-untyped-call]
        return turned
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def conv2d_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """The gradient for the input x of conv2d (B, in, H, W) from that for its output (B, out, h, w)."""
    match _way(x, weight, stride, padding, dilation, groups):
        case "folded":
            return _folded(gradient, x.shape, weight, stride, padding, dilation, channels_last=_channels_last(x))
        case "turned":
            return _turned(gradient, weight, padding)
    geometry = (_pair(stride), _pair(padding), _pair(dilation), False, (0, 0), groups)
    own: Tensor = torch.ops.aten.convolution_backward(gradient, x, weight, None, *geometry, (True, False, False))[0]
    return own
