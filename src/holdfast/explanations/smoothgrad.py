"""SmoothGrad: the gradient averaged over noise around the input."""

import torch
from torch import Tensor, nn

from holdfast.explanations.core.answers import describe, without_error
from holdfast.explanations.core.quantity import Setting, gradients_at, pieces
from holdfast.random import Noise
from holdfast.registry import Explainer
from holdfast.results import Explanation
from holdfast.utils.options import Count, Positive

BLOCK = 10
"""Draws that come from one generator: the noise of an input depends neither on the batch nor on the number of draws."""


def noise_blocks(noise: Noise, blocks: slice, x: Tensor) -> Tensor:
    """Standard normal noise for the inputs x (B, ...) in those blocks of draws, shape (B, draws, ...)."""
    numbers = range(blocks.start, blocks.stop)
    return torch.cat([noise.fork(k).generated_normal((BLOCK, *x.shape[1:]), x.dtype) for k in numbers], 1)


@Explainer(
    "smoothgrad",
    summary="the gradient averaged over Gaussian noise: the saliency of the smoothed model",
    reference="Smilkov et al., SmoothGrad: removing noise by adding noise, 2017",
)
def smoothgrad(
    model: nn.Module, x: Tensor, y: Tensor, setting: Setting, *, sigma: Positive = 0.15, samples: Count = 50
) -> Explanation:
    """A(x) = E of the gradient of f_y at x + e, e ~ N(0, sigma^2 I), shape of x.

    It is the gradient of f_y * N(0, sigma^2 I): it explains the smoothed model, not the model itself.

    Args:
        sigma: standard deviation of the noise, as a share of the range high - low.
        samples: draws for each input.
    """
    slope, values = torch.zeros_like(x), x.new_zeros(len(x))
    for part, blocks in pieces(len(x), -(-samples // BLOCK), max(1, setting.chunk // BLOCK)):
        points = noise_blocks(setting.noise[part], blocks, x[part])[:, : samples - BLOCK * blocks.start]
        points.mul_(sigma * (setting.high - setting.low)).add_(x[part, None])
        count = points.shape[1]
        gradient, value = gradients_at(model, points.flatten(0, 1), y[part].repeat_interleave(count), setting)
        slope[part] += gradient.view_as(points).sum(1)
        values[part] += value.view(-1, count).sum(1)
    slope /= samples
    how = f"gradient averaged over {samples} draws of noise {sigma:g}"
    return without_error(slope, values, slope, describe(y, setting, how), samples)
