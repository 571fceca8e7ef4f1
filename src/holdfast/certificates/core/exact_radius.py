"""The exact robust radius: bisection in which a complete certificate decides, from both sides.

A minimum-norm attack gives the first upper end. Then a radius is tried in the middle of the bracket: a proof lifts the
lower end, a counter-example lowers the upper end to its own distance, and a search that ends without a verdict only
closes the way up, so that proofs are sought below. What is returned is the last radius that was proved, never a
midpoint.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks.core.nearest import nearest
from holdfast.certificates.core.radius_search import Ball, Question, RadiusSearch
from holdfast.errors import OutOfTime, SoundnessError
from holdfast.utils import clock

LAST_DIGITS = 1e-6
"""Of a radius: below that, an example and a proof do not contradict each other."""


@dataclass(eq=False)
class _Bracket:
    """What is known of one input: proved <= true radius <= broken; above `limit` nothing can be proved in the time."""

    proved: float = 0.0
    broken: float = math.inf
    limit: float = math.inf
    looks: int = 0

    @property
    def top(self) -> float:
        """Upper end of what is worth being tried."""
        return min(self.broken, self.limit)


def decided_radius(q: Question, *, time_limit: float = 60.0, **options: Any) -> RadiusSearch:
    """Search the radius of each input with the certificate's own decisions.

    Args:
        q: the call of `hf.radius`.
        time_limit: seconds for each input, over all radii that are tried.
        **options: further options of the certificate.
    """
    ends = nearest(q.model, q.x, q.y, q.ball.name, low=q.ball.low, high=q.ball.high, chunk=q.chunk).distance.tolist()
    found = [_one(q, i, end, time_limit, options) for i, end in enumerate(ends)]
    proved = torch.tensor([one.proved for one in found], dtype=torch.float64, device=q.x.device)
    broken = torch.tensor([one.broken for one in found], dtype=torch.float64, device=q.x.device)
    top = torch.tensor([min(one.top, q.top) for one in found], dtype=torch.float64, device=q.x.device)
    looks = torch.tensor([one.looks for one in found], device=q.x.device)
    return RadiusSearch(proved.to(q.x), ((proved + top) / 2).to(q.x), looks, broken)


def _one(q: Question, i: int, broken: float, time_limit: float, options: dict[str, Any]) -> _Bracket:
    """Search for one input with an example at the distance `broken`, or at none if that is infinite."""
    if not bool(q.right[i]):
        return _Bracket(broken=0.0, limit=0.0)
    known = _Bracket(broken=broken, limit=_down(q.top, q.x))
    end = clock.now() + time_limit
    tried = known.limit if broken > known.limit else _down(broken / 2, q.x)
    while (left := end - clock.now()) > 0 and not clock.over():
        # Half of the time that is left: a radius that cannot be decided must leave time for the smaller ones.
        with clock.until(end):
            try:
                _look(q, i, tried, known, {"time_limit": left / 2, **options})
            except OutOfTime:
                break
        tried = _down((known.proved + known.top) / 2, q.x)
        # A bracket of two neighbouring floats cannot be halved, however small the tolerance.
        if known.top - known.proved <= q.tolerance or not known.proved < tried < known.top:
            break
    return known


def _look(q: Question, i: int, radius: float, known: _Bracket, options: dict[str, Any]) -> None:
    """Decide one radius of one input; updates what is known."""
    x, y = q.x[i : i + 1], q.y[i : i + 1]
    ball: Ball = replace(q.ball, eps=radius)
    found = q.method.function(q.model, x, y, ball, **options)
    known.looks += 1
    if bool(found.certified[0]):
        known.proved = radius
        return
    known.limit = radius
    if found.x_adv is None:
        return
    points = ball.project(found.x_adv, x)
    if bool((q.model(points).argmax(1) != y) & ball.contains(points, x)):
        size = float(ball.distance(_nearer(q, x, points, y), x))
        if size < known.proved * (1 - LAST_DIGITS):
            raise SoundnessError(
                f"'{q.method.name}' proves the radius {known.proved:.6g} of input {i} and finds an example of size "
                f"{size:.6g} for it. This is a bug in Holdfast: please report it with the model."
            )
        known.broken = min(known.broken, max(size, known.proved))


def _nearer(q: Question, x: Tensor, x_adv: Tensor, y: Tensor, halvings: int = 20) -> Tensor:
    """The nearest misclassified point that halving the way from an example to its input meets."""
    low, high = 0.0, 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        wrong = bool(q.model(x + middle * (x_adv - x)).argmax(1) != y)
        low, high = (low, middle) if wrong else (middle, high)
    near = x + high * (x_adv - x)
    return near if high < 1.0 and bool(q.model(near).argmax(1) != y) else x_adv


def _down(radius: float, x: Tensor) -> float:
    """The radius as a number of the dtype of x, not above it: so that the tensor returned holds what was proved."""
    near = torch.tensor(radius, dtype=torch.float64).to(x.dtype)
    above = float(near) > radius
    return float(torch.nextafter(near, near.new_tensor(-math.inf)) if above else near)
