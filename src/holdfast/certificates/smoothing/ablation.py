"""Images of which a network sees a part only: a band, a block, or some pixels; the rest is blotted out.

What is kept is a mask that is True where the network may look. An ablated value becomes `null`: a grey inside the valid
range, or a number outside of it, which no pixel can have. `TwoChannels` turns the latter into the encoding of Levine
and Feizi ("Robustness certificates for sparse adversarial attacks by randomized ablation", 2020).
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.random import Noise

Part = Literal["column", "row", "block"]


def ablate(x: Tensor, keep: Tensor, null: float) -> Tensor:
    """x where `keep` is True, `null` elsewhere; the shapes broadcast."""
    return torch.where(keep, x, torch.full((), null, dtype=x.dtype, device=x.device))


def windows(part: Part, size: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows (P, height) and columns (Q, width), bool, that a window keeps in each of its P x Q positions.

    A column is `size` wide and as high as the image, a row the other way round, a block size x size. A window that
    leaves the image on one side comes back on the other, so that each pixel is seen from equally many positions.
    """
    tall, wide = part in ("row", "block"), part in ("column", "block")
    if not (tall or wide):
        raise InputError(f"unknown part '{part}'; expected column, row or block")
    longest = min(height if tall else width, width if wide else height)
    if not 1 <= size <= longest:
        raise InputError(
            f"a {part} of size {size} does not fit an image of {height}x{width} pixels; size: 1 to {longest}"
        )
    whole = torch.ones(1, max(height, width), dtype=torch.bool)
    return (_ring(height, size) if tall else whole[:, :height], _ring(width, size) if wide else whole[:, :width])


def random_pixels(x: Tensor, size: int, noise: Noise) -> Tensor:
    """A mask of `size` pixels for each input, uniform over all such sets: (B, 1, H, W) for images, else (B, ...)."""
    count = pixels(x)
    if not 1 <= size <= count:
        raise InputError(f"size, the pixels that are kept, must be between 1 and the {count} of an input, got {size}")
    return choose(noise.bits((count,)), size, x.shape[1:])


def choose(key: Tensor, size: int, shape: Sequence[int]) -> Tensor:
    """Masks (N, ...) for an input of `shape`: the `size` pixels with the largest keys (N, pixels) are kept."""
    kept = torch.zeros_like(key, dtype=torch.bool).scatter_(1, key.topk(size, dim=1).indices, True)
    return kept.view(len(key), *((1, *shape[1:]) if len(shape) == 3 else shape))


def pixels(x: Tensor) -> int:
    """How many pixels an input has; where x is no batch of images (B, C, H, W) each value counts, as for `sparse`."""
    return math.prod(x.shape[2:] if x.ndim == 4 else x.shape[1:])


class TwoChannels(nn.Module):
    """(v, 1 - v) for a value v in [0, 1], (0, 0) for an ablated one; (B, C, H, W) -> (B, 2C, H, W).

    The first layer of a network that shall tell an ablated pixel from all others, as in the paper; `null` must lie
    outside of [0, 1] and be that of the certificate and of the training.

    >>> TwoChannels()(torch.tensor([0.25, -1.0]).view(1, 1, 1, 2)).flatten().tolist()
    [0.25, 0.0, 0.75, 0.0]
    """

    def __init__(self, null: float = -1.0) -> None:
        super().__init__()
        if 0 <= null <= 1:
            raise InputError(f"null must lie outside of [0, 1], where no pixel has it, got {null}")
        self.null = null

    def extra_repr(self) -> str:
        return f"null={self.null:g}"

    def forward(self, x: Tensor) -> Tensor:
        seen, zero = x != self.null, torch.zeros_like(x)
        return torch.cat([torch.where(seen, x, zero), torch.where(seen, 1 - x, zero)], 1)


def _ring(length: int, size: int) -> Tensor:
    """Cells that a window of `size` covers from each start on a ring, (length, length), bool."""
    start, cell = torch.arange(length)[:, None], torch.arange(length)
    return (cell - start) % length < size
