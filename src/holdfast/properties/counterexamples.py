"""Look for counter-examples before anything is proved: random points, then descent on the conditions."""

import math

import torch
from torch import Tensor

from holdfast.certificates.complete.problem import is_late
from holdfast.properties.points import Judge
from holdfast.utils import clock

SAMPLING = 0.2
"""Of the time for random points."""
CHUNK = 2**22
"""Numbers in a batch of random inputs, together with the widest guess of what the network makes of them."""


def search(
    judge: Judge, deadline: float, *, samples: int, starts: int, steps: int, rounds: int, seed: int
) -> Tensor | None:
    """A counter-example, as the network takes it, (*shape), or None.

    The best of `samples` random points start a projected sign descent on the sum by which the conditions of one group
    are missed; every start has a group of its own. Steps shrink from a quarter of the box.

    Args:
        judge: knows the case and confirms the points.
        deadline: value of `clock.now()` at which to stop.
        samples: random points.  starts: descents at a time.  steps: of each descent.
        rounds: how often descents start, from new points.
        seed: of the random points.
    """
    noise = torch.Generator().manual_seed(seed)
    now = clock.now()
    points = _best_samples(judge, now + SAMPLING * (deadline - now), samples, starts, noise)
    for _ in range(rounds):
        found = _descend(judge, points, deadline, steps)
        if found is not None or is_late(deadline) or bool((judge.low == judge.high).all()):
            return found
        points = _random(judge.low, judge.high, starts, noise)
    return None


def _random(low: Tensor, high: Tensor, count: int, noise: torch.Generator) -> Tensor:
    """Points (count, n): the centre, then points of the inside, of the faces and of the corners of the box.

    Counter-examples often lie on a face: a share of the inputs, another one for each point, is put to an end.
    """
    draw, end = (torch.rand(count, len(low), generator=noise, dtype=low.dtype) for _ in range(2))
    share = torch.rand(count, 1, generator=noise, dtype=low.dtype).mul(1.5).sub(0.25).clamp(0, 1)
    u = torch.where(end < share, (draw > 0.5).to(low.dtype), draw)
    u[0] = 0.5
    return low + (high - low) * u


@torch.no_grad()
def _best_samples(judge: Judge, deadline: float, samples: int, starts: int, noise: torch.Generator) -> Tensor:
    """The points (starts, n) of the random ones that come closest to a counter-example."""
    best, least = torch.empty(0, len(judge.low), dtype=judge.dtype), torch.empty(0, dtype=torch.float64)
    chunk = max(starts, min(samples, CHUNK // (64 * len(judge.low))))
    for _ in range(max(1, math.ceil(samples / chunk))):
        points = _random(judge.low, judge.high, chunk, noise)
        excess = judge.conditions.least(judge.model(judge.place(points.view(-1, *judge.shape))))
        excess = excess.nan_to_num(nan=torch.inf)
        best, least = torch.cat([best, points]), torch.cat([least, excess])
        order = least.argsort()[:starts]
        best, least = best[order], least[order]
        if is_late(deadline) or bool(least[0] < 0):
            break
    return best


@torch.no_grad()
def _aims(judge: Judge, points: Tensor) -> Tensor:
    """The group that each of the points (N, n) descends to: every other one its closest, the rest farther ones too."""
    output = judge.model(judge.place(points.view(-1, *judge.shape))).double()
    closest = judge.conditions.worst(output @ judge.conditions.rows.T - judge.conditions.limits).argsort(1)
    number = torch.arange(len(points))
    return closest[number, torch.where(number % 2 == 0, 0, number // 2 % judge.conditions.groups)]


def _descend(judge: Judge, points: Tensor, deadline: float, steps: int) -> Tensor | None:
    """Sign descent from the points (N, n), with a momentum; the first counter-example that is confirmed."""
    conditions = judge.conditions
    group = _aims(judge, points)
    own = (conditions.group[None] == group[:, None]).to(judge.dtype)
    rows, limits = conditions.rows.to(judge.dtype), conditions.limits.to(judge.dtype)
    width = judge.high - judge.low
    velocity = torch.zeros_like(points)
    for k in range(steps):
        x = judge.place(points.view(-1, *judge.shape)).requires_grad_(True)
        with torch.enable_grad():
            output = judge.model(x)
            missed = ((output @ rows.T - limits).clamp(min=0) + 1e-6 * (output @ rows.T - limits)) * own
            (gradient,) = torch.autograd.grad(missed.sum(), x)
        excess = conditions.least(output.detach())
        hits = (excess <= 0).nonzero()[:, 0]
        if len(hits):
            found = judge.check(x.detach()[hits[excess[hits].argsort()]])
            if found is not None:
                return found
        if is_late(deadline):
            return None
        velocity = 0.7 * velocity + gradient.flatten(1).sign()
        step = 0.25 * (0.01 ** (k / steps))
        points = x.detach().flatten(1) - step * width * velocity.sign()
    return None
