"""The nearest point of a hyperplane inside the pixel box: the inner problem of FAB.

    minimise |d|_p   subject to   <w, x + d> = b,   low <= x + d <= high.

Seen from x, value j has to move against w_j (or with it, if <w, x> < b) and has `room_j` to do so. The best move is

    Linf: min(s, room_j)      L2: min(s |w_j|, room_j)      L1: all of room_j, largest |w_j| first,

with the level s (for L1 the last value to move) at which the gap |<w, x> - b| is spent. Where the box does not reach
the hyperplane, every value goes as far as it can: the corner of the box nearest to it.
"""

import torch
from torch import Tensor


def move_to_hyperplane(x: Tensor, w: Tensor, b: Tensor, norm: str, low: float = 0.0, high: float = 1.0) -> Tensor:
    """The least move d that takes x onto the hyperplane, shape of x.

    Args:
        x: points in the box, shape (..., B, D): several points for each plane share one call, and one sort.
        w: normals, shape (B, D).  b: offsets, shape (B,).
        norm: "linf", "l2" or "l1".
        low, high: the box.
    """
    gap = (x * w).sum(-1) - b
    against = w * (1 - 2 * (gap >= 0).to(w.dtype))[..., None]
    room = torch.where(against < 0, x - low, high - x).clamp_(min=0)
    size = w.abs()
    if norm == "l1":
        moved = _largest_first(size, gap.abs(), room)
    else:
        weight = torch.ones_like(size) if norm == "linf" else size
        moved = torch.minimum(_level(size, weight, gap.abs(), room)[..., None] * weight, room)
    return moved * against.sign()


def _level(size: Tensor, weight: Tensor, gap: Tensor, room: Tensor) -> Tensor:
    """The s with sum_j size_j min(s weight_j, room_j) = gap, shape (..., B).

    The sum is concave and piecewise linear in s. Newton's method from s = 0 thus never passes the solution and ends on
    it: each round stops at least one more value at its room. A handful of rounds cost far less than a sort.
    """
    tiny = torch.finfo(size.dtype).tiny
    stop, gain, full = room / weight.clamp(min=tiny), size * weight, size * room
    s, whole = torch.zeros_like(gap), full.sum(-1)
    while True:
        moving = (stop > s[..., None]).to(size.dtype)  # products with a mask cost less than `torch.where`
        slope = (moving * gain).sum(-1)
        spent = whole - (moving * full).sum(-1)
        # A plane out of reach: any level beyond the last stop will do, as long as it is finite.
        ahead = torch.maximum(s, ((gap - spent) / slope.clamp(min=tiny)).clamp(max=1 / tiny**0.5))
        if not bool((ahead > s).any()):  # also where a NaN, which equals nothing, came in
            return s
        s = ahead


def _largest_first(size: Tensor, gap: Tensor, room: Tensor) -> Tensor:
    """Moves all of the room of the values with the largest size, until their share of the gap is spent."""
    ordered, order = size.sort(-1, descending=True)
    order = order.expand_as(room)
    room = room.gather(-1, order)
    full = ordered * room
    left = (gap[..., None] - (full.cumsum(-1) - full)).clamp(min=0)
    moved = torch.minimum(left / ordered.clamp(min=torch.finfo(size.dtype).tiny), room)
    return torch.zeros_like(room).scatter(-1, order, moved)
