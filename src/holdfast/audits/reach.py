"""How far the proofs reach where they do not reach the budget: the size at which half of a few inputs are proved."""

from collections.abc import Callable
from dataclasses import replace

import torch

from holdfast.audits.job import Job
from holdfast.audits.plan import Plan, Step
from holdfast.audits.side import Side
from holdfast.audits.words import rounded_down
from holdfast.certificates import certify
from holdfast.errors import OutOfTime, UnsupportedError
from holdfast.threats import L1, L2, Linf
from holdfast.utils import clock

LOOKED_AT = 16  # inputs
SECONDS = 5.0  # after which no further size is tried
SMALLER = 4.0  # factor from one size to the next
SIZES = 8  # sizes tried on the way down: to the smallest audited one divided by 65,536
HALVINGS, FINE = 3, 1.2  # halvings of the factor between the size that works and the one that does not, to this


def half_proved(job: Job, side: Side, plan: Plan) -> float | None:
    """Largest size found at which the first certificate of the plan proves half of a few inputs that are right.

    Looked for only where fewer than half of all inputs are proved at any audited size: then the sizes below the
    smallest audited one are tried, from large to small. None where nothing was looked for, or found in the time.
    """
    steps = [step for step in plan.steps if step.stage == "certify" and step.fits(side.threat)]
    known = sum(position in side.proved for position in side.right)
    if not side.right or 2 * known >= len(side.right) or not side.tried or not steps or steps[0].settles_all_levels:
        return None
    if not isinstance(side.threat, Linf | L2 | L1):
        return None
    try:
        with clock.until(clock.now() + SECONDS):
            return _search(_prover(job, side, steps[0]), side.sizes[0])
    except (UnsupportedError, OutOfTime):
        return None


def _prover(job: Job, side: Side, step: Step) -> Callable[[float], bool]:
    """Function from a size to whether half of the inputs are proved there."""
    x, y = job.take(torch.tensor(side.right[:LOOKED_AT]))

    def proves(size: float) -> bool:
        threat = replace(side.threat, eps=size)  # type: ignore[call-arg]
        found = certify(job.model, x, y, threat, step.method, **step.options)
        return 2 * int(found.certified.sum()) >= len(x)

    return proves


def _search(proves: Callable[[float], bool], smallest: float) -> float | None:
    """The largest size below `smallest` that passes, to a factor of 1.2; None if none does before the time is over."""
    low, high, last = 0.0, smallest, 0.0
    for _ in range(SIZES + HALVINGS):
        started = clock.now()
        if last > clock.left() or (low and high < FINE * low):
            break
        size = (low * high) ** 0.5 if low else high / SMALLER
        low, high = (size, high) if proves(size) else (low, size)
        last = clock.now() - started
    return rounded_down(low) if low else None
