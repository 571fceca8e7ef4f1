"""Shifted data: fifteen corruptions of images at five severities, in the manner of ImageNet-C.

Written from the definitions of Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions
and perturbations", 2019, for images of any size: lengths are given at 224 pixels and scale with the shorter side. The
random numbers of an image depend on the seed and on its place in the data, not on the batch. docs/pyramid.md says where
the definitions differ from the source.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.data.corruptions import blurs, digital, noises, weather
from holdfast.errors import InputError, did_you_mean
from holdfast.random import Noise

SEVERITIES = (1, 2, 3, 4, 5)
CORRUPTIONS: dict[str, Callable[[Tensor, int, Noise], Tensor]] = {
    "gaussian-noise": noises.gaussian_noise,
    "shot-noise": noises.shot_noise,
    "impulse-noise": noises.impulse_noise,
    "defocus-blur": blurs.defocus_blur,
    "glass-blur": blurs.glass_blur,
    "motion-blur": blurs.motion_blur,
    "zoom-blur": blurs.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic-transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg-compression": digital.jpeg_compression,
}
"""Each maps images (B, C, H, W) in [0, 1], a severity counted from 0, and noise to images of the same shape."""


def corrupt(x: Tensor, corruption: str, severity: int, *, seed: int = 0, first: int = 0, chunk: int = 64) -> Tensor:
    """Corrupted images, in [0, 1], of the shape and the dtype of x (B, C, H, W).

    Args:
        x: images in [0, 1] with one or three channels.
        corruption: a name of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: fixes every random choice.
        first: place of the first image in its data set; image i draws the same numbers in every batch.
        chunk: images at once; memory grows with it, the answer does not change.

    Example:
        >>> corrupt(torch.rand(2, 3, 20, 16), "fog", 3).shape
        torch.Size([2, 3, 20, 16])
    """
    if corruption not in CORRUPTIONS:
        raise InputError(f"unknown corruption '{corruption}'. " + did_you_mean(corruption, CORRUPTIONS))
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise InputError(f"severity: expected a whole number from 1 to 5, got {severity!r}")
    check_images(x)
    noise = Noise(seed, torch.arange(first, first + len(x), device=x.device))
    noise = noise.fork(list(CORRUPTIONS).index(corruption))  # the severities of a corruption share their draws
    change, wide = CORRUPTIONS[corruption], x if x.dtype == torch.float64 else x.float()
    parts = [change(wide[i : i + chunk], severity - 1, noise[slice(i, i + chunk)]) for i in range(0, len(x), chunk)]
    return (torch.cat(parts) if parts else x).clamp(0, 1).to(x.dtype)


def check_images(x: Tensor) -> None:
    """Refuse what cannot be corrupted: inputs that are not images, and pixels outside [0, 1]."""
    if x.ndim != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) < 4:
        raise InputError(
            f"a corruption needs images of shape (B, C, H, W) with 1 or 3 channels and at least 4 x 4 pixels, "
            f"got shape {tuple(x.shape)}"
        )
    if not bool(((x >= 0) & (x <= 1)).all()):
        raise InputError("a corruption needs pixels in [0, 1]; bring the images into that range first")
