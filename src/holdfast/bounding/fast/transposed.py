"""Transposed convolutions of many small maps, the main cost of backward substitution."""

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.utils.reference import is_reference


def conv_transpose(
    g: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    output_padding: tuple[int, int],
    groups: int,
    dilation: tuple[int, int],
) -> Tensor:
    """Compute F.conv_transpose2d of many small maps (N, C, h, w) in the fastest of three ways.

    Few values: one product with the materialised matrix, built by transposing the unit maps. Few products: these, and a
    fold. Otherwise torch's own kernel.
    """
    count, channels, h, w = g.shape
    options = (stride, padding, output_padding, groups, dilation)
    if is_reference():
        return F.conv_transpose2d(g, weight, None, *options)
    if count >= 2 * channels * h * w and h * w <= 4 * stride[0] * stride[1]:
        units = torch.eye(channels * h * w, dtype=g.dtype, device=g.device).view(-1, channels, h, w)
        matrix = F.conv_transpose2d(units, weight, None, *options)
        return (g.flatten(1) @ matrix.flatten(1)).view(count, *matrix.shape[1:])
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
