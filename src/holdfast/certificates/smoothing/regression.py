"""Any function with real values, smoothed and bounded: a percentile, or the mean if the values have a range.

f maps a batch of inputs (M, ...) to real values (M, ...), of any number and without a gradient: a regressor, a score, a
detector's box. It is evaluated on n noisy copies of each input; `percentile` has the mathematics.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.certificates.smoothing.percentile import (
    MeanBounds,
    PercentileBounds,
    check_sigma,
    each_confidence,
    mean_bounds,
    order_ranks,
    percentile_bounds,
    smallest_samples,
)
from holdfast.checks import check_inputs
from holdfast.errors import InputError
from holdfast.random import Noise

Function = Callable[[Tensor], Tensor]


def certify_percentile(
    f: Function,
    x: Tensor,
    epsilon: float,
    sigma: float,
    *,
    n: int = 2000,
    p: float = 0.5,
    confidence: float = 0.999,
    familywise: bool = False,
    batch: int = 1000,
    seed: int = 0,
) -> PercentileBounds:
    """Bounds of the p-th percentile of f(x' + G), G ~ N(0, sigma^2 I), for every x' with |x' - x|_2 < epsilon.

    Args:
        f: deterministic; NaN is refused, infinite values are not.
        x: inputs (B, ...); the noise is not clipped to any range.
        n: noisy copies of each input.
        confidence: of each bound of each value on its own; of all bounds of all inputs together if `familywise`.
        batch: copies in one call of f; the answer does not change.
        seed: fixes the noise, by position of the input and number of the copy.

    Example:
        >>> bounds = certify_percentile(lambda x: x.sum(1), torch.zeros(1, 4), 0.5, 1.0, n=1000)
        >>> bool((bounds.lower < -1) & (bounds.upper > 1))  # |w| epsilon = 1
        True
    """
    coordinates = _check(f, x, sigma, n, batch)
    each = each_confidence(confidence, coordinates, familywise=familywise)
    if None in order_ranks(n, epsilon, sigma, p=p, confidence=each):
        raise InputError(
            f"n = {n} noisy copies prove nothing at epsilon = {epsilon:g}, sigma = {sigma:g} and a confidence of "
            f"{each:.6g}; the smallest n that does is {smallest_samples(epsilon, sigma, p=p, confidence=each)}"
        )
    values = draw_values(f, x, sigma, n=n, batch=batch, seed=seed)
    bounds = percentile_bounds(values, epsilon, sigma, p=p, confidence=confidence, familywise=familywise)
    return replace(bounds, seed=seed)


def certify_mean(
    f: Function,
    x: Tensor,
    epsilon: float,
    sigma: float,
    *,
    low: float,
    high: float,
    n: int = 2000,
    confidence: float = 0.999,
    familywise: bool = False,
    batch: int = 1000,
    seed: int = 0,
) -> MeanBounds:
    """Bounds of the mean of f(x' + G) for every x' with |x' - x|_2 <= epsilon, for values of f in [low, high].

    Prefer `certify_percentile` where the range is wide. The arguments are those of `certify_percentile`.
    """
    _check(f, x, sigma, n, batch)
    values = draw_values(f, x, sigma, n=n, batch=batch, seed=seed)
    bounds = mean_bounds(values, epsilon, sigma, low=low, high=high, confidence=confidence, familywise=familywise)
    return replace(bounds, seed=seed)


@torch.no_grad()
def draw_values(f: Function, x: Tensor, sigma: float, *, n: int, batch: int, seed: int) -> Tensor:
    """f at n noisy copies of each input, (n, B, ...)."""
    found = []
    for pair in torch.arange(len(x) * n, device=x.device).split(batch):
        image, number = pair // n, pair % n
        noise = Noise(seed, image * 2**32 + number).normal(x.shape[1:], x.dtype)
        found.append(_values(f, x[image] + sigma * noise))
    values: Tensor = torch.cat(found).unflatten(0, (len(x), n))
    return values.transpose(0, 1)


def _check(f: Function, x: Tensor, sigma: float, n: int, batch: int) -> int:
    """Refuse what cannot be smoothed; the number of values of f on all inputs together."""
    check_inputs(x, -torch.finfo(torch.float64).max, torch.finfo(torch.float64).max)
    check_sigma(sigma)
    if n < 1 or batch < 1:
        raise InputError(f"n and batch must be at least 1, got n={n} and batch={batch}")
    with torch.no_grad():
        first, again = _values(f, x[:1]), _values(f, x[:1])
    if not torch.equal(first, again):
        raise InputError("f gives other values for the same input; smoothing needs a deterministic function")
    return max(1, first.numel()) * len(x)


def _values(f: Function, x: Tensor) -> Tensor:
    values = f(x)
    if not isinstance(values, Tensor) or values.ndim < 1 or len(values) != len(x) or not values.is_floating_point():
        shown = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"f must give real values of shape ({len(x)}, ...) for {len(x)} inputs, got {shown}")
    return values
