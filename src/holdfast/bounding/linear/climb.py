"""Gradient ascent on slopes: projected Adam that keeps the best value of every row, and the slopes behind it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from holdfast.bounding.core.adam import Adam
from holdfast.errors import OutOfTime
from holdfast.utils import clock
from holdfast.utils.options import NotNegative, Positive, Share, Whole, check_fields

K = TypeVar("K")
RESERVE = 6.0
"""Iterations' worth of time to leave before a deadline for the bound in float64 that follows the ascent."""


@dataclass(frozen=True)
class Ascent:
    """How to optimise: Adam with a learning rate that decays by `decay` each iteration.

    `joint` also optimises the slopes behind the bounds of the hidden layers, which are then computed anew in every
    iteration: tighter, and many times as costly. `hope` leaves out, in a certificate, the inputs whose margin by CROWN
    is below -hope times the margin of the input itself: slopes seldom make up for more than a tenth of it.
    """

    iterations: Whole = 20
    learning_rate: Positive = 0.25
    decay: Share = 0.98
    joint: bool = False
    hope: NotNegative = math.inf

    def __post_init__(self) -> None:
        check_fields(self)


ASCENT = Ascent()


def climb(
    slopes: dict[K, Tensor],
    bound: Callable[[], Tensor],
    ascent: Ascent,
    floors: dict[K, float],
    until: float = math.inf,
    note: Callable[[Tensor], None] | None = None,
    enough: Callable[[Tensor], bool] | None = None,
) -> Tensor:
    """Raise `bound()` (B, M) by projected Adam on the slopes; the best value of each row.

    Args:
        slopes: what is optimised, changed in place.
        bound: the bounds with the slopes as they are.
        ascent: how to optimise.
        floors: least value of each; the largest is 1.
        until: when to stop, by `holdfast.utils.clock.now`.
        note: called with (B, M) bool after every iterate: which rows are better than ever. A deadline then leaves time
            for one more bound.
        enough: called with the best values (B, M) after every iterate: True ends the ascent.
    """
    with torch.enable_grad():
        for slope in slopes.values():
            slope.requires_grad_(True)
        adam = Adam(list(slopes.values()), rate=ascent.learning_rate, decay=ascent.decay)
        start = clock.now()
        value = bound()
        reserve = 0.0 if note is None else RESERVE * (clock.now() - start)
        best = _noted(value, None, note)
        for _ in range(ascent.iterations if slopes else 0):
            if clock.now() > until or clock.left() < reserve or (enough is not None and enough(best)):
                break
            adam.step(torch.autograd.grad(-value.sum(), list(slopes.values()), allow_unused=True))
            with torch.no_grad():
                for k, slope in slopes.items():
                    slope.clamp_(floors[k], 1.0)
            try:
                value = bound()
            except OutOfTime:
                break
            best = _noted(value, best, note)
    return best


@torch.no_grad()
def _noted(value: Tensor, best: Tensor | None, note: Callable[[Tensor], None] | None) -> Tensor:
    """The better of a value and the best so far."""
    value = value.detach()
    if note is not None:
        note(torch.ones_like(value, dtype=torch.bool) if best is None else value > best)
    return value if best is None else torch.maximum(best, value)


@torch.no_grad()
def keep(kept: dict[K, Tensor], slopes: dict[K, Tensor], better: Tensor) -> None:
    """Put the slopes of the rows `better` (B, M) into `kept`.

    Slopes have the shape (B, M, ...), or (B, P, N, ...) with P N = M for rows at places of a map.
    """
    for k, slope in slopes.items():
        if k not in kept:
            kept[k] = slope.detach().clone()
            continue
        rows = slope.shape[:2] if slope.shape[1] == better.shape[1] else slope.shape[:3]
        mask = better.view(*rows, *[1] * (slope.ndim - len(rows)))
        kept[k] = torch.where(mask, slope.detach(), kept[k])
