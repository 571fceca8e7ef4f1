"""Confidence bounds from samples: for a probability, for the mean of a bounded quantity, and along a growing sample.

Every bound errs to the safe side: the special functions are good to a relative 1e-14, and `SLACK` is far more.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy import special
from torch import Tensor

from holdfast.errors import InputError

SLACK = 1e-12
"""Relative distance by which a bound is moved to the safe side, for rounding."""

AT_THE_CAP = 0.6
"""Share of alpha for the last look of a growing sample."""

CONFIDENCE = 0.95
"""Confidence of the intervals that reports show around a share of the inputs."""

Interval = Literal["bernstein", "hoeffding"]


def check_alpha(alpha: float) -> None:
    """Refuse an alpha that is not a probability of error."""
    if not 0 < alpha < 1:
        raise InputError(f"alpha is the probability of a wrong statement and must lie in (0, 1), got {alpha}")


def binomial_lower(successes: Tensor, trials: Tensor | int, alpha: Tensor | float) -> Tensor:
    """Lower bound of a probability that fails with probability alpha at most; any shapes that broadcast, float64.

    The largest p with P[Bin(trials, p) >= successes] <= alpha (Clopper and Pearson, "The use of confidence or fiducial
    limits illustrated in the case of the binomial", 1934); 0 where there is no success.

    >>> round(float(binomial_lower(torch.tensor(100_000), 100_000, 0.001)), 6)
    0.999931
    """
    k, n, a = _checked(successes, trials, alpha)
    with np.errstate(all="ignore"):
        p = special.betaincinv(k, n - k + 1, a)
    return _tensor(np.where(k > 0, p * (1 - SLACK), 0.0), successes)


def binomial_upper(successes: Tensor, trials: Tensor | int, alpha: Tensor | float) -> Tensor:
    """Upper bound of a probability that fails with probability alpha at most; as `binomial_lower`, float64.

    The smallest p with P[Bin(trials, p) <= successes] <= alpha; 1 where every trial succeeded.
    """
    k, n, a = _checked(successes, trials, alpha)
    with np.errstate(all="ignore"):
        p = special.betainccinv(k + 1, n - k, a)
    return _tensor(np.where(k < n, np.minimum(p * (1 + SLACK), 1.0), 1.0), successes)


def clopper_pearson(count: int, total: int, *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact interval of a probability after `count` hits in `total` draws (Clopper and Pearson, 1934).

    The one interval that Holdfast shows around a share of the inputs. It covers the truth at least as often as it says,
    unlike the normal interval and Wilson's.

    >>> tuple(round(end, 3) for end in clopper_pearson(0, 10))
    (0.0, 0.308)
    """
    hits, tail = torch.tensor(count), (1 - confidence) / 2
    return float(binomial_lower(hits, total, tail)), float(binomial_upper(hits, total, tail))


def binomial_p_value(first: Tensor, second: Tensor) -> Tensor:
    """Two-sided exact test that two classes are drawn equally often, from how often each was; float64.

    P[|Bin(n, 1/2) - n/2| >= |first - n/2|] with n = first + second; 1 where n is 0.
    """
    n, most = (first + second).cpu().numpy(), torch.maximum(first, second).cpu().numpy()
    with np.errstate(all="ignore"):
        tail = special.betainc(most, n - most + 1, 0.5)
    return _tensor(np.where(2 * most > n, np.minimum(2 * tail * (1 + SLACK), 1.0), 1.0), first)


def mean_interval(
    samples: Tensor, low: float, high: float, alpha: float, *, interval: Interval = "bernstein"
) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the mean of a quantity in [low, high], each failing with probability alpha at most.

    Hoeffding ("Probability inequalities for sums of bounded random variables", 1963) pays for the range,
    (high - low) sqrt(ln(1/alpha) / 2n); the empirical Bernstein bound (Maurer and Pontil, "Empirical Bernstein bounds
    and sample variance penalization", 2009, theorem 4) for the variance V that was seen,
    sqrt(2 V ln(2/alpha) / n) + 7 (high - low) ln(2/alpha) / (3 (n - 1)).

    Args:
        samples: (n, ...) in [low, high], n at least 2.
    """
    check_alpha(alpha)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"a mean needs a finite range low < high, got [{low}, {high}]; the percentiles need none")
    values, n = samples.double(), len(samples)
    if n < 2:
        raise InputError(f"an interval for a mean needs at least 2 samples, got {n}")
    if not bool(((values >= low) & (values <= high)).all()):
        raise InputError(f"there are samples outside [{low:g}, {high:g}], or NaN; the bound would be wrong")
    mean, scale = values.mean(0), high - low
    if interval == "hoeffding":
        width = torch.full_like(mean, scale * math.sqrt(math.log(1 / alpha) / (2 * n)))
    else:
        log = math.log(2 / alpha)
        width = (2 * values.var(0) * log / n).sqrt() + 7 * scale * log / (3 * (n - 1))
    width = width * (1 + SLACK) + scale * SLACK
    return (mean - width).clamp(min=low), (mean + width).clamp(max=high)


@dataclass(frozen=True)
class Looks:
    """When a growing sample is looked at, and how much of alpha each look may spend.

    Attributes:
        sizes: samples drawn at each look, growing; the last one is the cap.
        alphas: probability of error of each look's own bound; they sum to alpha at most.
    """

    sizes: tuple[int, ...]
    alphas: tuple[float, ...]


def looks(cap: int, alpha: float, *, first: int = 100, growth: float = 1.25) -> Looks:
    """Looks at first, first * growth, ... in multiples of `first`, and at the cap, with their alphas.

    The bounds of all looks hold together with probability 1 - alpha, by the union bound, so that one may stop at any
    of them for any reason. The cap gets most of alpha, so that early looks hardly weaken what can be proved there. The
    earlier looks share the rest in proportion to the root of their size: late looks decide hard inputs, where a small
    alpha costs more samples. Both choices, and the growth, came out of simulations.

    >>> looks(1000, 0.001, growth=2).sizes
    (100, 200, 400, 1000)
    """
    check_alpha(alpha)
    steps = itertools.takewhile(lambda size: size <= cap / growth, (first * growth**j for j in itertools.count()))
    early = sorted({int(size // first) * first for size in steps})
    weights = [math.sqrt(size) for size in early]
    shares = [(1 - AT_THE_CAP) * alpha * weight / sum(weights) for weight in weights]
    return Looks((*early, cap), (*shares, AT_THE_CAP * alpha if early else alpha))


def _checked(successes: Tensor, trials: Tensor | int, alpha: Tensor | float) -> tuple[np.ndarray, ...]:
    """Return the three arguments as float64 arrays of one shape."""
    # A Python number becomes float64 at once; by way of float32 alpha would grow.
    given = (torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in (successes, trials, alpha))
    k, n, a = torch.broadcast_tensors(*given)
    if bool(((a <= 0) | (a >= 1)).any()):
        check_alpha(float(a[(a <= 0) | (a >= 1)][0]))
    if bool(((k < 0) | (k > n)).any()):
        raise InputError("there are more successes than trials, or fewer than none")
    return k.numpy(), n.numpy(), a.numpy()


def _tensor(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64).to(like.device)


def standard_error(count: int) -> float:
    """The largest standard error of a share of `count` inputs, sqrt(0.25 / count): half a percent at 10,000.

    >>> standard_error(10_000)
    0.005
    """
    if count < 1:
        raise InputError(f"a share of {count} inputs has no standard error; count must be at least 1")
    return math.sqrt(0.25 / count)


def medals(shares: Sequence[float], count: int) -> list[str]:
    """For each share of `count` inputs: "gold" for the highest, "silver" where it is within two standard errors.

    A share a is silver if a_top - SE <= a + SE: by this rule such results are not told apart (Wang et al., "Improving
    robust generalization by direct PAC-Bayesian bound minimization", 2023). It says nothing of other seeds.

    >>> medals([0.617, 0.608, 0.602], 10_000)
    ['gold', 'silver', '']
    """
    top, error = max(shares), standard_error(count)
    # The slack is for rounding: at the very edge a result counts as silver.
    return ["gold" if share == top else "silver" if top - error <= share + error + SLACK else "" for share in shares]
