"""Gradients where the input lies, and averaged over noise around it: saliency, input x gradient, SmoothGrad."""

import math

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.explanations.core.quantity import Setting, gradients_at, pieces
from holdfast.random import Noise
from holdfast.registry import Explainer, register
from holdfast.results import Explanation


def describe(y: Tensor, setting: Setting, how: str) -> tuple[str, ...]:
    """What was explained, for each input."""
    labels = y.tolist()
    texts = {label: f"{setting.quantity} of class {label}: {how}" for label in set(labels)}
    return tuple(texts[label] for label in labels)


def without_error(
    attribution: Tensor, values: Tensor, slope: Tensor | None, by: tuple[str, ...], gradients: int
) -> Explanation:
    """The answer of a method that promises no completeness; `ok` where the model's `values` (B,) are finite."""
    # Quick: NaN and infinity stay in a sum. A gradient holds none of them, see `input_gradient`.
    total = values.sum() if attribution is slope else values.sum() + attribution.sum()
    if math.isfinite(total.item()):
        ok = torch.ones_like(values, dtype=torch.bool)
    else:
        ok = torch.isfinite(attribution).flatten(1).all(1) & torch.isfinite(values)
    error = torch.full_like(values, torch.nan, dtype=attribution.dtype)
    return Explanation(attribution, ok, error, torch.full_like(ok, gradients, dtype=torch.int64), by, slope)


@register(
    Explainer(
        "saliency",
        summary="the gradient of the answer at the input",
        reference="Simonyan, Vedaldi and Zisserman, Deep inside convolutional networks, 2014",
    )
)
def saliency(model: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> Explanation:
    """A(x) = gradient of f_y at x, with its sign; shape of x.

    The cheapest, and says what an infinitely small change does. On a model that is not robust the gradient at x need
    not be normal to any boundary near x; `bsm` is.
    """
    slope, values = gradients_at(model, x, y, setting)
    return without_error(slope, values, slope, describe(y, setting, "gradient at the input"), 1)


@register(
    Explainer(
        "input-x-gradient",
        summary="the gradient times the input: exact shares of the answer of a linear model without bias",
        reference="Shrikumar, Greenside and Kundaje, Learning important features through propagating activation "
        "differences, 2017",
    )
)
def input_x_gradient(model: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> Explanation:
    """A(x) = x * gradient of f_y at x; a value of zero gets zero, whatever it means. Shape of x."""
    slope, values = gradients_at(model, x, y, setting)
    return without_error(x * slope, values, slope, describe(y, setting, "input x gradient"), 1)


BLOCK = 10
"""Draws that come from one generator: the noise of an input depends neither on the batch nor on the number of draws."""


def noise_blocks(noise: Noise, blocks: slice, x: Tensor) -> Tensor:
    """Standard normal noise for the inputs x (B, ...) in those blocks of draws, shape (B, draws, ...)."""
    numbers = range(blocks.start, blocks.stop)
    return torch.cat([noise.fork(k).generated_normal((BLOCK, *x.shape[1:]), x.dtype) for k in numbers], 1)


@register(
    Explainer(
        "smoothgrad",
        summary="the gradient averaged over Gaussian noise: the saliency of the smoothed model",
        reference="Smilkov et al., SmoothGrad: removing noise by adding noise, 2017",
    )
)
def smoothgrad(
    model: nn.Module, x: Tensor, y: Tensor, setting: Setting, *, sigma: float = 0.15, samples: int = 50
) -> Explanation:
    """A(x) = E of the gradient of f_y at x + e, e ~ N(0, sigma^2 I), shape of x.

    It is the gradient of f_y * N(0, sigma^2 I): it explains the smoothed model, not the model itself.

    Args:
        sigma: standard deviation of the noise, as a share of the range high - low.
        samples: draws for each input.
    """
    if not sigma > 0 or samples < 1:
        raise InputError(f"smoothgrad needs sigma > 0 and samples >= 1, got {sigma} and {samples}")
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
