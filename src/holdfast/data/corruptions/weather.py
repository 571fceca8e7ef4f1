"""Weather: snow, frost, fog, and bright light."""

import math

from torch import Tensor

from holdfast.data.corruptions.filters import clouds, filtered, line_kernels, scale_of, zoomed
from holdfast.random import Noise


def snow(x: Tensor, level: int, noise: Noise) -> Tensor:
    """Flakes: bright spots of noise, enlarged and blurred along their fall, on a whitened image."""
    mean, deviation, zoom, least, length, sigma, kept = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )[level]
    drawn = mean + deviation * noise.fork(0).normal((1, *x.shape[2:]), x.dtype)
    flakes = zoomed(drawn, zoom)
    flakes = (flakes * (flakes >= least)).clamp(0, 1)
    angles = (noise.fork(1).uniform((), x.dtype) * 90 - 135) * (math.pi / 180)
    flakes = filtered(flakes, line_kernels(length * scale_of(x), sigma * scale_of(x), angles))
    white = x.maximum(grey(x) * 1.5 + 0.5)
    return (kept * x + (1 - kept) * white).clamp(0, 1) + flakes + flakes.flip(2, 3)


def grey(x: Tensor) -> Tensor:
    """Luminance, (B, 1, H, W)."""
    weights = x.new_tensor((0.299, 0.587, 0.114) if x.shape[1] == 3 else (1.0,))
    return (x * weights[:, None, None]).sum(1, keepdim=True)


def frost(x: Tensor, level: int, noise: Noise) -> Tensor:
    """Crystals on the lens: bright ridges of random clouds, added to a darker image."""
    kept, strength = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[level]
    ridges = 1 - (2 * clouds(x, 1.5, noise) - 1).abs()
    return kept * x + strength * ridges**2


def fog(x: Tensor, level: int, noise: Noise) -> Tensor:
    """Clouds in front, at less contrast: (x + c clouds) max(x) / (max(x) + c)."""
    strength, decay = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))[level]
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + strength * clouds(x, decay, noise)) * brightest / (brightest + strength)


def brightness(x: Tensor, level: int, noise: Noise) -> Tensor:
    """The value of hue, saturation and value, raised; hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    raised = (value + (0.1, 0.2, 0.3, 0.4, 0.5)[level]).clamp(max=1)
    return (x * (raised / value.clamp(min=1e-12))).where(value > 0, raised)
