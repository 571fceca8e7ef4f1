"""What several corruptions share: lengths in proportion, filters, sampling, and random clouds."""

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample, interpolate, pad

from holdfast.random import Noise


def scale_of(x: Tensor) -> float:
    """Lengths are defined at 224 pixels; this is the factor for the shorter side of x (B, C, H, W)."""
    return min(x.shape[2:]) / 224


def filtered(x: Tensor, kernels: Tensor) -> Tensor:
    """Images (B, C, H, W) under a kernel each, (B, k, k), or one for all, (1, k, k), with k odd; edges are repeated."""
    batch, channels, height, width = x.shape
    half = kernels.shape[-1] // 2
    kernels = kernels.to(x).expand(batch, -1, -1).repeat_interleave(channels, 0)[:, None]
    flat = pad(x, [half] * 4, mode="replicate").reshape(1, batch * channels, height + 2 * half, width + 2 * half)
    return conv2d(flat, kernels, groups=batch * channels).view_as(x)


def gaussian(x: Tensor, sigma: float) -> Tensor:
    """Gaussian blur, cut off at four deviations; edges are repeated."""
    half = max(1, math.ceil(4 * sigma))
    weights = torch.exp(-(torch.arange(-half, half + 1, dtype=x.dtype, device=x.device) ** 2) / (2 * sigma**2))
    weights = (weights / weights.sum()).expand(x.shape[1], 1, 1, -1)
    x = conv2d(pad(x, [half, half, 0, 0], mode="replicate"), weights, groups=x.shape[1])
    return conv2d(pad(x, [0, 0, half, half], mode="replicate"), weights.transpose(2, 3), groups=x.shape[1])


def mirrored_gaussian(x: Tensor, sigma: float) -> Tensor:
    """Gaussian blur, cut off at three deviations; the image goes on as its own mirror image, however far that is.

    A blur wider than the image needs this: where edges are repeated, their few pixels would take most of the weight.
    """
    half = int(3 * sigma + 0.5)
    offsets = torch.arange(-half, half + 1, device=x.device)
    weights = torch.exp(-((offsets / sigma) ** 2) / 2).to(x.dtype)

    def blur(n: int) -> Tensor:
        """What each of n pixels takes of the others, (n, n)."""
        places = (torch.arange(n, device=x.device)[:, None] + offsets) % (2 * n)
        places = torch.where(places < n, places, 2 * n - 1 - places)
        return x.new_zeros(n, n).scatter_add_(1, places, (weights / weights.sum()).expand(n, -1).contiguous())

    return blur(x.shape[2]) @ x @ blur(x.shape[3]).T


def line_kernels(length: float, sigma: float, angles: Tensor) -> Tensor:
    """Kernels (B, k, k) of motions at angles (B,): weights exp(-t^2 / 2 sigma^2) at distances t up to `length`."""
    half = max(1, math.ceil(length))
    count = 4 * half + 1
    t = torch.linspace(0, length, count, dtype=angles.dtype, device=angles.device)
    weights = torch.exp(-(t**2) / (2 * sigma**2))
    grid = torch.arange(-half, half + 1, dtype=angles.dtype, device=angles.device)
    # Each point of the line is shared between the four pixels around it.
    rows = (1 - (angles.sin()[:, None] * t)[..., None].sub(grid).abs()).clamp(min=0)
    columns = (1 - (angles.cos()[:, None] * t)[..., None].sub(grid).abs()).clamp(min=0)
    kernels = torch.einsum("t,bti,btj->bij", weights, rows, columns)
    return kernels / kernels.sum((1, 2), keepdim=True)


def sampled(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """x at the pixel coordinates (B, H, W), between pixels bilinearly; reflected at the edges."""
    height, width = x.shape[2:]
    grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], -1)
    return grid_sample(x, grid.to(x.dtype), padding_mode="reflection", align_corners=False)


def pixel_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each pixel, (1, H, W) each."""
    rows, columns = torch.meshgrid(
        *(torch.arange(n, dtype=x.dtype, device=x.device) for n in x.shape[2:]), indexing="ij"
    )
    return rows[None], columns[None]


def zoomed(x: Tensor, factor: float) -> Tensor:
    """The centre of each image, enlarged by `factor`."""
    rows, columns = pixel_grid(x)
    middle = [(n - 1) / 2 for n in x.shape[2:]]
    places = [((v - m) / factor + m).expand(len(x), -1, -1) for v, m in zip((rows, columns), middle, strict=True)]
    return sampled(x, *places)


def clouds(x: Tensor, decay: float, noise: Noise) -> Tensor:
    """Random clouds in [0, 1], (B, 1, H, W): octaves of smooth noise, each `decay` times weaker than the last."""
    height, width = x.shape[2:]
    total = x.new_zeros(len(x), 1, height, width)
    for octave in range(math.ceil(math.log2(max(height, width))) + 1):
        size = [min(2**octave + 1, n) for n in (height, width)]
        drawn = noise.fork(octave).uniform((1, *size), x.dtype)
        total += decay**-octave * interpolate(drawn, (height, width), mode="bilinear", align_corners=True)
    low, high = total.amin((1, 2, 3), keepdim=True), total.amax((1, 2, 3), keepdim=True)
    return (total - low) / (high - low).clamp(min=1e-12)
