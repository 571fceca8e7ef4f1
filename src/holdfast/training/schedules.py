"""Learning rate and budget over time, as pure functions of the progress: nothing to save, nothing to resume.

A learning-rate schedule maps the progress `t` in epochs (0 <= t <= epochs) to a factor on the recipe's `optimizer.lr`;
a budget schedule maps it to a factor on the threat's budget. The loop asks once per step, at the middle of the step, so
that a milestone at epoch 100 acts on the first step of that epoch and no step of a warm-up is lost at zero.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import replace

from holdfast.errors import InputError
from holdfast.threats import L1, L2, Linf, Threat

Schedule = Callable[..., float]


def constant(t: float, epochs: float) -> float:
    """One throughout."""
    return 1.0


def step(t: float, epochs: float, *, every: float, gamma: float = 0.1) -> float:
    """gamma^k after k times `every` epochs."""
    if every <= 0 or gamma <= 0:
        raise InputError(f"the step schedule needs every > 0 and gamma > 0, got {every:g} and {gamma:g}")
    return float(gamma ** (t // every))


def multistep(t: float, epochs: float, *, milestones: tuple[float, ...], gamma: float = 0.1) -> float:
    """gamma^k once k of the milestones (epochs) are past.

    >>> [multistep(t, 200, milestones=(100, 150)) for t in (99.9, 100)]
    [1.0, 0.1]
    """
    if gamma <= 0 or list(milestones) != sorted(milestones):
        raise InputError(f"the multistep schedule needs gamma > 0 and rising milestones, got {gamma:g}, {milestones}")
    return gamma ** bisect.bisect_right(milestones, t)


def cosine(t: float, epochs: float, *, final: float = 0.0) -> float:
    """Half a cosine from one down to `final` (Loshchilov and Hutter, "SGDR", 2017, without restarts)."""
    if final < 0:
        raise InputError(f"the cosine schedule needs final >= 0, got {final:g}")
    return final + (1 - final) * (1 + math.cos(math.pi * t / epochs)) / 2


def one_cycle(t: float, epochs: float, *, peak: float = 0.4, initial: float = 0.0, final: float = 0.0) -> float:
    """Linear from `initial` up to one at the fraction `peak` of the run, then linear down to `final`.

    Piecewise linear as in Wong, Rice and Kolter, "Fast is better than free", 2020.
    """
    if not 0 < peak < 1 or initial < 0 or final < 0:
        raise InputError(
            "the one-cycle schedule needs 0 < peak < 1, initial >= 0 and final >= 0, "
            f"got {peak:g}, {initial:g} and {final:g}"
        )
    part = t / epochs
    if part < peak:
        return initial + (1 - initial) * part / peak
    return 1 + (final - 1) * (part - peak) / (1 - peak)


def cyclic(t: float, epochs: float, *, period: float, low: float = 0.0) -> float:
    """Triangles from `low` up to one and back, `period` epochs each (Smith, "Cyclical learning rates", 2017)."""
    if period <= 0 or not 0 <= low <= 1:
        raise InputError(f"the cyclic schedule needs period > 0 and 0 <= low <= 1, got {period:g} and {low:g}")
    return low + (1 - low) * (1 - abs(2 * (t % period) / period - 1))


def linear_rise(
    t: float,
    epochs: float,
    *,
    end: float | None = None,
    start: float = 0.0,
    initial: float = 0.0,
    peak: float = 1.0,
    final: float = 1.0,
) -> float:
    """`initial` until the epoch `start`, linear up to `final` at the epoch `end`.

    Without `end` it rises until the end of the run or period. A `peak` above one heads for so many times the rise, and
    stops where it is complete: Liu et al., "On the loss landscape of adversarial training", 2020, rise to twice the
    budget. `final` above one trains for more than the budget that counts, as certified training does on MNIST.
    """
    risen = min(1.0, peak * _risen(t, start, epochs if end is None else end, peak, final))
    if not 0 <= initial <= final:
        raise InputError(f"a rising budget needs 0 <= initial <= final, got {initial:g} and {final:g}")
    return initial + (final - initial) * risen


def log_rise(
    t: float,
    epochs: float,
    *,
    end: float | None = None,
    start: float = 0.0,
    initial: float = 0.01,
    final: float = 1.0,
) -> float:
    """`initial` until the epoch `start`, then by the same factor in every step, up to `final` at the epoch `end`.

    The schedule of Leino, Wang and Fredrikson, "Globally robust neural networks", 2021.

    >>> [round(log_rise(t, 10, initial=0.01), 6) for t in (0, 5, 10)]
    [0.01, 0.1, 1.0]
    """
    risen = _risen(t, start, epochs if end is None else end, 1.0, final)
    if not 0 < initial <= final:
        raise InputError(f"the logarithmic rise needs 0 < initial <= final, got {initial:g} and {final:g}")
    return float(initial * (final / initial) ** risen)


def cosine_rise(
    t: float, epochs: float, *, end: float | None = None, start: float = 0.0, peak: float = 1.0, final: float = 1.0
) -> float:
    """As `linear_rise`, along half a cosine."""
    risen = _risen(t, start, epochs if end is None else end, peak, final)
    return final * min(1.0, peak * (1 - math.cos(math.pi * risen)) / 2)


def smooth_rise(
    t: float,
    epochs: float,
    *,
    end: float | None = None,
    start: float = 0.0,
    middle: float = 0.25,
    power: float = 4.0,
    final: float = 1.0,
) -> float:
    """Zero until `start`, then along a power that turns into a straight line at the fraction `middle` of the rise.

    Slow where small budgets decide which neurons die: the schedule of Xu et al., "Automatic perturbation analysis for
    scalable certified robustness and beyond", 2020.
    """
    if not 0 < middle < 1 or power < 1:
        raise InputError(f"the smooth rise needs 0 < middle < 1 and power >= 1, got {middle:g} and {power:g}")
    risen = _risen(t, start, epochs if end is None else end, 1.0, final)
    # Both pieces meet at `middle` with the same slope: c middle^power there, and slope c power middle^(power - 1).
    c = 1 / (middle**power + power * middle ** (power - 1) * (1 - middle))
    if risen < middle:
        return float(final * c * risen**power)
    return float(final * c * (middle**power + power * middle ** (power - 1) * (risen - middle)))


def doubling(t: float, epochs: float, *, first: float, every: float, final: float = 1.0) -> float:
    """`first`, doubled after every `every` epochs until it reaches `final`.

    (Liu, Salzmann and Süsstrunk, "Training provably robust models by polyhedral envelope regularization", 2020.)

    >>> [doubling(t, 100, first=0.064, every=20, final=1.024) for t in (0, 19.9, 20, 99)]
    [0.064, 0.064, 0.128, 1.024]
    """
    if not 0 < first <= final or every <= 0:
        raise InputError(
            f"the doubling budget needs 0 < first <= final and every > 0, got {first:g}, {final:g} and {every:g}"
        )
    return float(min(final, first * 2.0 ** (t // every)))


def _risen(t: float, start: float, end: float, peak: float, final: float) -> float:
    if not 0 <= start < end or peak < 1 or final <= 0:
        raise InputError(
            "a rising budget needs 0 <= start < end (epochs), peak >= 1 and final > 0, "
            f"got start {start:g}, end {end:g}, peak {peak:g} and final {final:g}"
        )
    return min(max((t - start) / (end - start), 0.0), 1.0)


LEARNING_RATES: dict[str, Schedule] = {"constant": constant, "step": step, "multistep": multistep, "cosine": cosine}
LEARNING_RATES |= {"one-cycle": one_cycle, "cyclic": cyclic}
BUDGETS: dict[str, Schedule] = {"constant": constant, "linear": linear_rise}
BUDGETS |= {"cosine": cosine_rise, "smooth": smooth_rise, "log": log_rise, "doubling": doubling}


def warm_up(t: float, epochs: float) -> float:
    """Linear from zero to one over the first `epochs`, a factor on any learning-rate schedule."""
    return min(1.0, t / epochs) if epochs > 0 else 1.0


def with_budget(threat: Threat, factor: float) -> Threat:
    """The threat with its budget scaled.

    >>> str(with_budget(Linf(0.5), 0.5))
    'linf:0.25'
    """
    if factor == 1:
        return threat
    if not isinstance(threat, Linf | L2 | L1):
        raise InputError(
            f"the budget of '{threat}' cannot be scaled, only a ball's. Use budget.name = 'constant', or "
            "an objective that opens patches and pixels by and by, such as 'patch' or 'sparse'"
        )
    return replace(threat, eps=threat.eps * factor)
