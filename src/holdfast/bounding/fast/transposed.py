"""Transposed convolutions of many small maps, the main cost of backward substitution."""

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.utils.reference import is_reference

Pair = tuple[int, int]
FEW_CHANNELS = 16
"""Up to here a convolution takes half to nine tenths of the time of a transposed one; with more, as long."""


def conv_transpose(
    g: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    groups: int,
    dilation: Pair,
) -> Tensor:
    """Compute F.conv_transpose2d of many small maps (N, C, h, w) in the fastest of four ways.

    Few values: one product with the materialised matrix, built by transposing the unit maps. Few channels without a
    stride: a convolution with the kernel turned round. Few products: these, and a fold. Otherwise torch's own kernel.
    """
    count, channels, h, w = g.shape
    options = (stride, padding, output_padding, groups, dilation)
    if is_reference():
        return F.conv_transpose2d(g, weight, None, *options)
    if count >= 2 * channels * h * w and h * w <= 4 * stride[0] * stride[1]:
        units = torch.eye(channels * h * w, dtype=g.dtype, device=g.device).view(-1, channels, h, w)
        matrix = F.conv_transpose2d(units, weight, None, *options)
        return (g.flatten(1) @ matrix.flatten(1)).view(count, *matrix.shape[1:])
    if channels <= FEW_CHANNELS and not torch.is_grad_enabled() and _turns(weight, *options):
        return _turned(g, weight, padding, dilation)
    if weight[0].numel() > channels or groups > 1 or count == 0:
        return F.conv_transpose2d(g, weight, None, *options)
    kernel = (weight.shape[2], weight.shape[3])
    size = [
        (s - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1 + output_padding[i]
        for i, s in enumerate((h, w))
    ]
    # `@` would make one product of all maps, for which it has to copy them; that pays only for the smallest ones.
    taps = weight.flatten(1).T
    columns = taps @ g.flatten(2) if h * w < 16 else torch.bmm(taps.expand(count, *taps.shape), g.flatten(2))
    # All maps as channels of one: `fold` has a fixed cost for each map, none for each channel.
    folded = F.fold(columns.reshape(1, -1, h * w), (size[0], size[1]), kernel, dilation, padding, stride)
    return folded.view(count, weight.shape[1], *size)


def _turns(weight: Tensor, stride: Pair, padding: Pair, output_padding: Pair, groups: int, dilation: Pair) -> bool:
    """True if the transposed convolution is a convolution of the padded maps, as many zeros on every side."""
    reach = [dilation[i] * (weight.shape[2 + i] - 1) - padding[i] for i in range(2)]
    return groups == 1 and stride == (1, 1) and output_padding == (0, 0) and min(reach) >= 0


def _turned(g: Tensor, weight: Tensor, padding: Pair, dilation: Pair) -> Tensor:
    """Without a stride, A^T g is the convolution of g with the kernel turned by 180 degrees, its channels swapped."""
    kernel = weight.flip(2, 3).transpose(0, 1).contiguous()
    down, across = (dilation[i] * (weight.shape[2 + i] - 1) - padding[i] for i in range(2))
    return F.conv2d(g, kernel, None, 1, (down, across), dilation)
