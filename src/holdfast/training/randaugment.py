"""RandAugment and other random changes of images, each fixed by the seed, the step and the image's place in the data.

Cubuk et al., "RandAugment: practical automated data augmentation with a reduced search space", 2020.
"""

import math
from collections.abc import Callable

import torch
from scipy.special import betaincinv
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, pad

from holdfast.random import Noise

Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Images (B, C, H, W), strengths (B, 1, 1, 1) in [0, 1] and signs (B, 1, 1, 1) to images."""


def warped(x: Tensor, matrices: Tensor, *, fill: float = 0.5) -> Tensor:
    """x under affine maps (B, 2, 3) of coordinates in [-1, 1]; grey where they leave the image."""
    grid = affine_grid(matrices.to(x.dtype), list(x.shape), align_corners=False)
    return grid_sample(x - fill, grid, align_corners=False) + fill


def _affine(x: Tensor, rows: tuple[tuple[Tensor | float, ...], tuple[Tensor | float, ...]]) -> Tensor:
    zero = x.new_zeros(len(x))
    return warped(x, torch.stack([torch.stack([zero + value for value in row], 1) for row in rows], 1))


def _rotate(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    angle = (strength * sign).flatten() * math.radians(30)
    ratio = x.shape[2] / x.shape[3]  # coordinates are shares of the sides, which may differ
    return _affine(x, ((angle.cos(), -angle.sin() * ratio, 0.0), (angle.sin() / ratio, angle.cos(), 0.0)))


def _shear_x(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _affine(x, ((1.0, 0.3 * (strength * sign).flatten(), 0.0), (0.0, 1.0, 0.0)))


def _shear_y(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _affine(x, ((1.0, 0.0, 0.0), (0.3 * (strength * sign).flatten(), 1.0, 0.0)))


def _translate_x(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _affine(x, ((1.0, 0.0, 0.6 * (strength * sign).flatten()), (0.0, 1.0, 0.0)))  # up to 30 % of the width


def _translate_y(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _affine(x, ((1.0, 0.0, 0.0), (0.0, 1.0, 0.6 * (strength * sign).flatten())))


def _blend(x: Tensor, other: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """other + f (x - other) with f = 1 -+ 0.9 strength: towards the other image, or away from it."""
    return (other + (1 + 0.9 * strength * sign) * (x - other)).clamp(0, 1)


def _grey(x: Tensor) -> Tensor:
    weights = x.new_tensor((0.299, 0.587, 0.114)) if x.shape[1] == 3 else x.new_ones(x.shape[1]) / x.shape[1]
    return (x * weights[:, None, None]).sum(1, keepdim=True)


def _smooth(x: Tensor) -> Tensor:
    kernel = x.new_tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]]).div(13).expand(x.shape[1], 1, 3, 3)
    return conv2d(pad(x, [1] * 4, mode="replicate"), kernel, groups=x.shape[1])


def _autocontrast(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp(min=1e-12), x)


def _equalize(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Every value becomes the share of the pixels of its channel that lie below it: ranks over 256 steps."""
    steps = (255 * x).round().flatten(2)
    ranked = torch.searchsorted(steps.sort(-1).values, steps).to(x.dtype)
    largest = ranked.amax(-1, keepdim=True)
    return torch.where(largest > 0, ranked / largest.clamp(min=1), x.flatten(2)).view_as(x)


def _posterize(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    step = 2.0 ** (4 * strength).round()  # 8 bits down to 4
    return ((255 * x).round() / step).floor() * step / 255


OPERATIONS: dict[str, Operation] = {
    "identity": lambda x, strength, sign: x,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "rotate": _rotate,
    "solarize": lambda x, strength, sign: torch.where(x >= 1 - strength, 1 - x, x),
    "color": lambda x, strength, sign: _blend(x, _grey(x), strength, sign),
    "posterize": _posterize,
    "contrast": lambda x, strength, sign: _blend(x, _grey(x).mean((2, 3), keepdim=True), strength, sign),
    "brightness": lambda x, strength, sign: _blend(x, torch.zeros_like(x), strength, sign),
    "sharpness": lambda x, strength, sign: _blend(x, _smooth(x), strength, sign),
    "shear-x": _shear_x,
    "shear-y": _shear_y,
    "translate-x": _translate_x,
    "translate-y": _translate_y,
}


def randaugment(x: Tensor, noise: Noise, *, operations: int, magnitude: float) -> Tensor:
    """Change images (B, C, H, W) in [0, 1] by so many operations each, drawn evenly, at magnitude 0 to 10."""
    for turn in range(operations):
        drawn, side = noise.fork(2 * turn).integers(len(OPERATIONS)), noise.fork(2 * turn + 1).integers(2)
        x = x.clone()
        for number, operation in enumerate(OPERATIONS.values()):
            chosen = drawn == number
            if bool(chosen.any()):
                part, sign = x[chosen], (2.0 * side[chosen] - 1).to(x.dtype)[:, None, None, None]
                x[chosen] = operation(part, torch.full_like(sign, magnitude / 10), sign)
    return x.clamp(0, 1)


def inception_crop(x: Tensor, noise: Noise, *, least: float) -> Tensor:
    """A random rectangle of each image at the size of the whole: share of the area from `least` to 1, sides 3:4 to 4:3.

    (Szegedy et al., "Going deeper with convolutions", 2015.) A rectangle that would not fit is cut to the image.
    """
    area, ratio, across, down = (noise.fork(i).uniform((), x.dtype) for i in range(4))
    share = least + (1 - least) * area
    ratio = torch.exp((2 * ratio - 1) * math.log(4 / 3))
    width, height = (share * ratio).sqrt().clamp(max=1), (share / ratio).sqrt().clamp(max=1)
    return _affine(
        x, ((width, 0.0, (1 - width) * (2 * across - 1)), (0.0, height, (1 - height) * (2 * down - 1)))
    ).clamp(0, 1)


def random_brightness(x: Tensor, noise: Noise, *, most: float) -> Tensor:
    """x + u with u uniform in [-most, most] for each image, kept in [0, 1]."""
    shift = most * (2 * noise.uniform((), x.dtype) - 1)
    return (x + shift[:, None, None, None]).clamp(0, 1)


def cutout(x: Tensor, noise: Noise, *, side: int) -> Tensor:
    """x (B, C, H, W) with a grey square of `side` pixels around a random pixel of each image; cut off at the edges.

    DeVries and Taylor, "Improved regularization of convolutional neural networks with cutout", 2017, where the square
    is the mean of the data.
    """
    top, left = (noise.fork(axis).integers(x.shape[2 + axis]) - side // 2 for axis in range(2))
    rows, columns = torch.arange(x.shape[2], device=x.device), torch.arange(x.shape[3], device=x.device)
    tall = (rows >= top[:, None]) & (rows < top[:, None] + side)
    wide = (columns >= left[:, None]) & (columns < left[:, None] + side)
    return torch.where(tall[:, None, :, None] & wide[:, None, None, :], 0.5, x)


def mixing_weights(noise: Noise, *, alpha: float, probability: float) -> Tensor:
    """Weights (B,) in [1/2, 1], float64: of Beta(alpha, alpha), the larger of w and 1 - w; 1 where nothing is mixed."""
    u, coin = noise.fork(0).uniform((), torch.float64), noise.fork(1).uniform((), torch.float64)
    w = torch.from_numpy(betaincinv(alpha, alpha, u.cpu().numpy())).to(u.device)
    return torch.where(coin < probability, torch.maximum(w, 1 - w), 1.0)
