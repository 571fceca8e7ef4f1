"""How far is the half-space <a, d> + b <= 0? The least norm of d, with d free or kept inside the valid range.

By duality the distance is the largest value, over all ways to split |a| into two parts a1, a2 >= 0, of

    (b - <a2, room>) / |a1|_q,

where room_j is how far value j can move against a_j, and q is dual to p. *Every* split gives a lower bound. The split
is therefore found in floating point, by sorting, and only the last formula needs a rounding-error term.
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from holdfast.bounding.core.rounding import gamma, norm_underflow, underflow, unit
from holdfast.threats import Threat

Norm = Literal["linf", "l2", "l1"]
NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")


def norm_of(ball: Threat) -> Norm:
    """The norm of a ball; the registry lets no other threat through."""
    return cast(Norm, ball.name)


@dataclass(frozen=True, eq=False)
class HalfSpaces:
    """<slope, d> + value <= 0 for K rows of each input, all in float64."""

    slope: Tensor  # (B, K, n)
    value: Tensor  # (B, K), a lower bound of the value at d = 0
    room: Tensor | None  # (B, K, n), how far each value can move against its slope; None without a valid range
    sound: bool  # round distances down


def half_spaces(
    x: Tensor, slope: Tensor, shift: Tensor, *, valid: tuple[float, float] | None, sound: bool
) -> HalfSpaces:
    """Where the planes <slope, x'> + shift are at or below zero, seen from x (B, ...); slope (B, K, ...), shift (B, K).

    `valid` is the range that all values of x' are kept in; `sound` accounts for the rounding of the value at x.
    """
    u, v = slope.flatten(2).double(), x.flatten(1).double()
    value = (u @ v[:, :, None])[:, :, 0] + shift.double()
    if sound:
        size = (u.abs() @ v.abs()[:, :, None])[:, :, 0] + shift.double().abs()
        value = value - 2 * gamma(v.shape[1], torch.float64) * size - underflow(v.shape[1], torch.float64)
    room = None
    if valid is not None:
        up, down = (valid[1] - v)[:, None], (v - valid[0])[:, None]
        room = torch.where(u > 0, down, up).clamp(min=0)
    return HalfSpaces(u, value, room, sound)


@dataclass(frozen=True, eq=False)
class Dual:
    """The best split of |slope| into a1 and a2 for each half-space, as the two numbers that it comes down to."""

    top: Tensor  # (B, K), value - <a2, room>, rounded down
    bottom: Tensor  # (B, K), |a1|_q, rounded up
    sound: bool  # round what is made of them to the safe side as well


def dual(h: HalfSpaces, norm: Norm) -> Dual:
    """The split that `distance` and `reach` share: the sort behind it is most of their cost.

    Liu et al. ("Training provably robust models by polyhedral envelope regularization", 2020, algorithm 1) clip and
    re-solve in rounds; the sort used here ends at the same optimum without rounds.
    """
    size = h.slope.abs()
    free = size if h.room is None else split(size, h.value.clamp(min=0), h.room, norm)
    g = 2 * gamma(size.shape[2], torch.float64) if h.sound else 0.0
    bottom = _dual_norm(free, norm) * (1 + g)
    if h.sound and norm == "l2":
        bottom = bottom + norm_underflow(size.shape[2], torch.float64)
    if h.room is None:
        return Dual(h.value, bottom, h.sound)
    blocked = ((size - free) * h.room).sum(2)
    top = h.value - blocked * (1 + g)
    top = top - g * top.abs() - underflow(size.shape[2], torch.float64) if h.sound else top
    return Dual(top, bottom, h.sound)


def distance(d: Dual) -> Tensor:
    """Distance to each half-space, (B, K): 0 where x lies in it, infinite where no valid input does.

    Without a valid range it is max(0, value / |slope|_q).
    """
    tiny = torch.finfo(torch.float64).tiny
    found = torch.where(d.bottom > 0, d.top / d.bottom.clamp(min=tiny), torch.inf)
    found = found * (1 - 4 * unit(torch.float64)) if d.sound else found
    # An overflow in the planes proves nothing.
    return torch.where((d.top > 0) & d.top.isfinite() & d.bottom.isfinite(), found, torch.zeros_like(d.top))


def reach(d: Dual, eps: Tensor) -> Tensor:
    """Lower bound of <slope, d> + value over |d| <= eps inside the range, (B, K); eps (B,).

    Positive wherever the half-space is farther than eps: the split is the one that the distance comes from.
    """
    value = d.top - eps.double()[:, None] * d.bottom
    return value - 4 * unit(torch.float64) * (d.top.abs() + value.abs()) if d.sound else value


def _dual_norm(values: Tensor, norm: Norm) -> Tensor:
    match norm:
        case "linf":
            return values.sum(2)
        case "l2":
            return values.square().sum(2).sqrt()
        case "l1":
            return values.amax(2)


def split(size: Tensor, value: Tensor, room: Tensor, norm: Norm) -> Tensor:
    """The best a1 for a = `size`: what is left of |a| when the values that run out of room pay for it; (B, K, n).

    The nearest point moves value j by min(s w_j, room_j), w_j = 1 for p = inf and |a_j| for p = 2, with the s that
    spends all of `value`; it stops at s = room_j / w_j. For p = 1 it moves the values with the largest |a_j| first.
    """
    if norm == "l1":
        return torch.minimum(size, _price(size, value, room)[..., None])
    # Clamped where the square and the inverse are still normal numbers.
    weight = torch.ones_like(size) if norm == "linf" else size.clamp(min=1e-150)
    stop, order = (room / weight).sort(2)
    gain = (size * weight).gather(2, order)
    full = (size * room).gather(2, order)
    # With the first k values stopped: spent(s) = sum_{i<k} full_i + s sum_{i>=k} gain_i, for s up to the next stop.
    before = full.cumsum(2) - full
    moving = gain.flip(2).cumsum(2).flip(2)
    piece = (before + stop * moving < value[..., None]).sum(2, keepdim=True)
    last = piece.clamp(max=size.shape[2] - 1)
    left = (value[..., None] - before.gather(2, last)).clamp(min=0)
    s = left / moving.gather(2, last).clamp(min=torch.finfo(size.dtype).tiny)
    s = torch.where(piece == size.shape[2], torch.inf, s)  # no valid input is in the half-space
    if norm == "linf":
        return torch.where(room > s, size, torch.zeros_like(size))
    return torch.where(s > 0, torch.minimum(size, room / s), size)


def _price(size: Tensor, value: Tensor, room: Tensor) -> Tensor:
    """|a_j| of the value at which the budget of p = 1 runs out, (B, K); 0 if it never does."""
    sorted_size, order = size.sort(2, descending=True)
    spent = (sorted_size * room.gather(2, order)).cumsum(2)
    piece = (spent < value[..., None]).sum(2, keepdim=True)
    price = sorted_size.gather(2, piece.clamp(max=size.shape[2] - 1))
    return torch.where(piece == size.shape[2], torch.zeros_like(price), price)[..., 0]
