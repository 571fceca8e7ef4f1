"""Bounds of a smoothed real-valued function: percentiles by order statistics, and the mean of a bounded function.

With G ~ N(0, sigma^2 I), the p-th percentile of f(x + G) moves little when x does: for every ||delta||_2 < epsilon

    h_{p-}(x) <= h_p(x + delta) <= h_{p+}(x),   p-+ = Phi(Phi^-1(p) -+ epsilon / sigma)

(Chiang et al., "Detection as regression: certified object detection by median smoothing", 2020). f may be any function
and needs no range; x may be an input or the weights of a network. The ranks of the order statistics that stand for
h_{p-} and h_{p+} are corrected: docs/smoothing.md, "Ranks".
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import special
from torch import Tensor

from holdfast.errors import InputError
from holdfast.utils.intervals import SLACK, Interval, mean_interval
from holdfast.utils.show import Shown


@dataclass(frozen=True, eq=False, repr=False)
class PercentileBounds(Shown):
    """Bounds of a smoothed percentile over the ball; each tensor has the shape of one sample."""

    lower: Tensor  # -inf where the samples are too few for a bound
    median: Tensor  # the estimate of the percentile itself (the median for p = 1/2)
    upper: Tensor  # +inf where the samples are too few
    confidence: float  # that one bound of one coordinate holds; that all hold if `familywise`
    epsilon: float  # radius of the open l2 ball
    sigma: float
    n: int  # samples
    p: float = 0.5
    familywise: bool = False
    seed: int | None = None  # of the noise, where the samples were drawn here


@dataclass(frozen=True, eq=False, repr=False)
class MeanBounds(Shown):
    """Bounds of a smoothed mean over the ball, lower <= E f(x + delta + G) <= upper, and the `mean` of the samples."""

    lower: Tensor
    mean: Tensor
    upper: Tensor
    confidence: float  # that one bound of one coordinate holds; that all hold if `familywise`
    epsilon: float  # radius of the closed l2 ball
    sigma: float
    n: int  # samples
    familywise: bool = False
    seed: int | None = None  # of the noise, where the samples were drawn here


def order_ranks(
    n: int, epsilon: float, sigma: float, *, p: float = 0.5, confidence: float
) -> tuple[int | None, int | None]:
    """Ranks q_l, q_u (1 is the smallest sample) of the order statistics that bound the percentile p over the ball.

    q_l = max {q : P[Bin(n, p-) >= q] >= confidence},  q_u = min {q : P[Bin(n, p+) <= q - 1] >= confidence};

    None where no sample will do. Ties and infinite samples do no harm.

    >>> order_ranks(2000, 0.36, 0.25, confidence=0.99999)
    (102, 1899)
    """
    _check(epsilon, sigma, p, confidence)
    if n < 1:
        raise InputError(f"order statistics need at least 1 sample, got {n}")
    # By symmetry, the upper rank of p is the lower rank of 1 - p counted from the other end.
    below, above = (_lower_rank(n, _moved(q, epsilon, sigma), confidence) for q in (p, 1 - p))
    return below, None if above is None else n + 1 - above


def smallest_samples(epsilon: float, sigma: float, *, p: float = 0.5, confidence: float) -> int:
    """Fewest samples for which both ranks of `order_ranks` exist.

    >>> smallest_samples(1.44, 1.0, confidence=0.99999)
    148
    """
    _check(epsilon, sigma, p, confidence)
    tail = min(_moved(p, epsilon, sigma), _moved(1 - p, epsilon, sigma))
    fail = (1 - confidence) * (1 - SLACK)
    # One sample must fall into the tail: (1 - tail)^n <= 1 - confidence.
    n = math.log(fail) / math.log1p(-tail) if tail > 0 else math.inf
    if n > 2**53:
        raise InputError(
            f"epsilon / sigma = {epsilon / sigma:g} is out of reach of sampling; "
            "take a larger sigma or a smaller epsilon"
        )
    return max(1, math.ceil(n))


def percentile_bounds(
    samples: Tensor,  # values of f at n independent draws of x + G, shape (n, ...); infinite ones too, but no NaN
    epsilon: float,
    sigma: float,
    *,
    p: float = 0.5,
    confidence: float = 0.999,  # of each bound of each coordinate on its own
    familywise: bool = False,  # make it the confidence that all bounds of all coordinates hold together
) -> PercentileBounds:
    """Bounds of the p-th percentile of f(x + delta + G) for every ||delta||_2 < epsilon, coordinate by coordinate."""
    _check(epsilon, sigma, p, confidence)
    if samples.ndim < 1 or len(samples) < 1:
        raise InputError(f"samples must have shape (n, ...) with n >= 1, got {tuple(samples.shape)}")
    if bool(samples.isnan().any()):
        raise InputError("there are NaN among the samples; give what has no value the value +inf or -inf")
    n, each = len(samples), each_confidence(confidence, samples[0].numel(), familywise=familywise)
    low, high = order_ranks(n, epsilon, sigma, p=p, confidence=each)
    ordered = samples.sort(0).values
    infinite = torch.full_like(ordered[0], torch.inf)
    return PercentileBounds(
        -infinite if low is None else ordered[low - 1],
        ordered[min(n, max(1, math.ceil(n * p))) - 1],
        infinite if high is None else ordered[high - 1],
        confidence,
        epsilon,
        sigma,
        n,
        p,
        familywise,
    )


def each_confidence(confidence: float, coordinates: int, *, familywise: bool) -> float:
    """Confidence of one bound: if `familywise`, the two bounds of all coordinates share the risk equally."""
    return 1 - (1 - confidence) / (2 * max(1, coordinates)) if familywise else confidence


def mean_bounds(
    samples: Tensor,
    epsilon: float,
    sigma: float,
    *,
    low: float,
    high: float,
    confidence: float = 0.999,
    familywise: bool = False,
    interval: Interval = "bernstein",
) -> MeanBounds:
    """Bounds of the mean of f(x + delta + G) for every ||delta||_2 <= epsilon, for values of f in [low, high].

    With g the smoothed mean, sigma Phi^-1((g - low) / (high - low)) is 1-Lipschitz in x (Salman et al., "Provably
    robust deep learning via adversarially trained smoothed classifiers", 2019). `confidence` is for each side of
    each coordinate, or for all together if `familywise`. Prefer the percentiles where the range is wide or unknown.
    `samples` as for `percentile_bounds`.
    """
    _check(epsilon, sigma, 0.5, confidence)
    each = each_confidence(confidence, samples[0].numel() if len(samples) else 1, familywise=familywise)
    below, above = mean_interval(samples, low, high, 1 - each, interval=interval)
    scale = high - low

    def move(mean: Tensor, shift: float) -> Tensor:
        share = ((mean - low) / scale).clamp(0, 1).cpu().numpy()
        moved = special.ndtr(special.ndtri(share) + shift)
        return low + scale * torch.as_tensor(np.asarray(moved)).to(mean)

    lower = (move(below, -epsilon / sigma) - scale * SLACK).clamp(min=low)
    upper = (move(above, epsilon / sigma) + scale * SLACK).clamp(max=high)
    return MeanBounds(lower, samples.double().mean(0), upper, confidence, epsilon, sigma, len(samples), familywise)


def check_sigma(sigma: float) -> None:
    """Refuse what is not a standard deviation."""
    if not (math.isfinite(sigma) and sigma > 0):
        raise InputError(f"sigma is the standard deviation of the noise and must be a positive number, got {sigma}")


def _check(epsilon: float, sigma: float, p: float, confidence: float) -> None:
    check_sigma(sigma)
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise InputError(f"epsilon is a radius and must be a finite number, 0 or more, got {epsilon}")
    if not 0 < p < 1:
        raise InputError(f"p must lie in (0, 1), got {p}; the median is 0.5")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must lie in (0, 1), got {confidence}")


def _moved(p: float, epsilon: float, sigma: float) -> float:
    """Phi(Phi^-1(p) - epsilon / sigma), rounded down."""
    return float(special.ndtr(special.ndtri(p) - epsilon / sigma)) * (1 - SLACK)


def _lower_rank(n: int, p: float, confidence: float) -> int | None:
    """Largest q with P[Bin(n, p) < q] <= 1 - confidence, by bisection: the probability grows with q."""
    fail = (1 - confidence) * (1 - SLACK)
    low, high = 0, n + 1
    while high - low > 1:
        q = (low + high) // 2
        if float(special.betaincc(q, n - q + 1, p)) <= fail:
            low = q
        else:
            high = q
    return low or None
