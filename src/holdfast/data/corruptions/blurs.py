"""Blur: out of focus, frosted glass, motion and zoom."""

import math

import torch
from torch import Tensor

from holdfast.data.corruptions.filters import filtered, gaussian, line_kernels, pixel_grid, scale_of, zoomed
from holdfast.random import Noise


def defocus_blur(x: Tensor, level: int, noise: Noise) -> Tensor:
    """Mean over a disc, whose edge is soft."""
    radius = (3, 4, 6, 8, 10)[level] * scale_of(x)
    return filtered(x, disc(radius))


def disc(radius: float) -> Tensor:
    """A disc of any radius as a kernel (1, k, k): it ends softly, within a pixel."""
    half = math.ceil(radius + 1)
    axis = torch.arange(-half, half + 1, dtype=torch.float64)
    inside = (radius + 1 - (axis[:, None] ** 2 + axis**2).sqrt()).clamp(0, 1)
    return (inside / inside.sum())[None]


def glass_blur(x: Tensor, level: int, noise: Noise) -> Tensor:
    """Blur, then every pixel takes the place of one nearby, several times; then blur."""
    sigma, reach, times = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[level]
    sigma, reach = sigma * max(scale_of(x), 0.5), max(1, round(reach * scale_of(x)))
    x = gaussian(x, sigma)
    (rows, columns), (height, width) = pixel_grid(x), x.shape[2:]
    for turn in range(times):
        shift = noise.fork(turn).integers(2 * reach + 1, (2, height, width)) - reach
        places = (rows + shift[:, 0]).clamp(0, height - 1), (columns + shift[:, 1]).clamp(0, width - 1)
        index = (places[0].long() * width + places[1].long()).flatten(1)[:, None].expand(-1, x.shape[1], -1)
        x = x.flatten(2).gather(2, index).view_as(x)
    return gaussian(x, sigma)


def motion_blur(x: Tensor, level: int, noise: Noise) -> Tensor:
    """Mean along a line at a random angle of up to 45 degrees, with weights that fall off."""
    length, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[level]
    angles = (noise.uniform((), x.dtype) - 0.5) * (math.pi / 2)
    return filtered(x, line_kernels(length * scale_of(x), sigma * scale_of(x), angles))


def zoom_blur(x: Tensor, level: int, noise: Noise) -> Tensor:
    """Mean of the image and of enlargements of its centre."""
    end, step = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))[level]
    factors = [1 + step * i for i in range(math.ceil((end - 1) / step - 1e-9))]  # 1, 1 + step, ... below `end`
    return (x + torch.stack([zoomed(x, factor) for factor in factors]).sum(0)) / (len(factors) + 1)
