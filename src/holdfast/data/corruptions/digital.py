"""Digital: contrast, warping, coarse pixels and JPEG."""

import math

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate, pad

from holdfast.data.corruptions.filters import mirrored_gaussian, pixel_grid, sampled, scale_of
from holdfast.random import Noise


def contrast(x: Tensor, level: int, noise: Noise) -> Tensor:
    """mean + c (x - mean), the mean of each channel of an image."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + (0.4, 0.3, 0.2, 0.1, 0.05)[level] * (x - mean)


def elastic_transform(x: Tensor, level: int, noise: Noise) -> Tensor:
    """A random affine map, then displacements that a Gaussian smooths; lengths are shares of the shorter side."""
    strength, smooth, jitter = (
        (2, 0.7, 0.1),
        (2, 0.08, 0.2),
        (0.05, 0.01, 0.02),
        (0.07, 0.01, 0.02),
        (0.12, 0.01, 0.02),
    )[level]
    side, (rows, columns) = min(x.shape[2:]), pixel_grid(x)
    centre = [(n - 1) / 2 for n in x.shape[2:]]
    # Three corners of a square around the centre move by `moved`, and an affine map follows them: the upper left one,
    # the upper right one, and the lower right one. Half the side of the square is a third of the shorter side.
    moved = (2 * noise.fork(0).uniform((3, 2), x.dtype) - 1) * jitter * side
    half = max(side // 3, 1)
    down, right = ((v - c) / (2 * half) + 0.5 for v, c in zip((rows, columns), centre, strict=True))
    shift = [
        moved[:, 0, axis, None, None]
        + (moved[:, 1, axis] - moved[:, 0, axis])[:, None, None] * right
        + (moved[:, 2, axis] - moved[:, 1, axis])[:, None, None] * down
        for axis in range(2)
    ]
    drawn = 2 * noise.fork(1).uniform((2, *x.shape[2:]), x.dtype) - 1
    # The mean of n draws falls with the root of n, so that on fewer pixels the same shares give longer ways.
    field = strength * side * scale_of(x) * mirrored_gaussian(drawn, max(smooth * side, 0.5))
    return sampled(x, rows + shift[0] + field[:, 0], columns + shift[1] + field[:, 1])


def pixelate(x: Tensor, level: int, noise: Noise) -> Tensor:
    """Means over coarse pixels, each shown as a box."""
    share = (0.6, 0.5, 0.4, 0.3, 0.25)[level]
    rows, columns = (max(1, int(n * share)) for n in x.shape[2:])
    coarse = adaptive_avg_pool2d(x, (rows, columns))
    return interpolate(coarse, x.shape[2:], mode="nearest-exact")


# Quantisation of luminance and colour at quality 50, from annex K of the standard (ITU-T T.81).
_LUMINANCE = (
    *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22),
    *(29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103),
    *(121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)
_COLOUR = (
    *(17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66),
    *((99,) * 38),
)
_TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


def jpeg_compression(x: Tensor, level: int, noise: Noise) -> Tensor:
    """JPEG at a low quality: cosine transform of blocks of 8 x 8, rounded in steps of the quantisation tables."""
    return jpeg(x, (25, 18, 15, 10, 7)[level])


def jpeg(x: Tensor, quality: int) -> Tensor:
    """What JPEG keeps of images (B, C, H, W), colours at full resolution; the coding of the numbers loses nothing."""
    height, width = x.shape[2:]
    values = 255 * pad(x, [0, -width % 8, 0, -height % 8], mode="replicate")
    matrix = torch.tensor(_TO_YCC, dtype=x.dtype, device=x.device) if x.shape[1] == 3 else x.new_ones(1, 1)
    planes = torch.einsum("ij,bjhw->bihw", matrix, values)
    planes[:, 0] -= 128
    scale = 5000 / quality if quality < 50 else 200 - 2 * quality
    tables = x.new_tensor((_LUMINANCE, _COLOUR, _COLOUR)[: x.shape[1]]).view(-1, 1, 8, 1, 8)
    steps = ((tables * scale + 50) / 100).floor().clamp(1, 255)
    cosines = dct_matrix(x)
    blocks = planes.unflatten(3, (-1, 8)).unflatten(2, (-1, 8))  # (B, C, rows, 8, columns, 8)
    found = torch.einsum("ki,bcriqj,lj->bcrkql", cosines, blocks, cosines)
    kept = (found / steps).round() * steps
    back = torch.einsum("ki,bcrkql,lj->bcriqj", cosines, kept, cosines).flatten(4).flatten(2, 3)
    back[:, 0] += 128
    out = torch.einsum("ij,bjhw->bihw", torch.linalg.inv(matrix), back)[..., :height, :width]
    return out.round().clamp(0, 255) / 255


def dct_matrix(like: Tensor) -> Tensor:
    """The orthonormal cosine transform of eight values, (8, 8)."""
    k, n = torch.arange(8, dtype=torch.float64)[:, None], torch.arange(8, dtype=torch.float64)
    matrix = torch.cos(math.pi / 8 * (n + 0.5) * k) / 2
    matrix[0] /= math.sqrt(2)
    return matrix.to(like)
