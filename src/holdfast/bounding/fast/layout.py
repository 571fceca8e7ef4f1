"""Order of maps in memory: with the channels last, convolutions and their gradients take less time."""

import torch
from torch import Tensor

from holdfast.utils.reference import is_reference


def channels_last(x: Tensor) -> Tensor:
    """Lay images (B, C, H, W) of one to four channels out in memory as oneDNN trains convolutions fastest.

    The maps of the layers behind follow. With one channel torch sees no difference between the two orders, and has to
    be told by the strides.
    """
    if is_reference():
        return x
    if x.ndim != 4 or x.shape[1] > 4 or x.requires_grad or x.device.type != "cpu" or x.dtype != torch.float32:
        return x
    x = x.contiguous(memory_format=torch.channels_last)
    return x.as_strided(x.shape, (x.stride(0), 1, x.stride(2), x.stride(3))) if x.shape[1] == 1 else x


def _is_last(x: Tensor) -> bool:
    """True if the channels of maps (B, C, H, W) are neighbours in memory."""
    return x.ndim == 4 and x.stride(1) == 1 < x.shape[1]


def like_bounds(values: Tensor, bounds: Tensor) -> Tensor:
    """Lay coefficients (B, M, C, H, W) out with their channels last if the bounds (B, C, H, W) of the maps are.

    Transposed convolutions of them then take two thirds of the time, and their maps stay like that.
    """
    if is_reference() or not _is_last(bounds):
        return values
    return values.flatten(0, 1).contiguous(memory_format=torch.channels_last).view(values.shape)


def like_maps(x: Tensor) -> Tensor:
    """Return x; lay its gradient out as x itself, if x has one: other gradients are slow to use."""
    if x.requires_grad and _is_last(x) and not is_reference():
        x.register_hook(_channels_last)
    return x


def _channels_last(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)
