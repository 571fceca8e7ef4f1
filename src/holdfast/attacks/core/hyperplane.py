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
    direction = w.sign() * (1 - 2 * (gap >= 0).to(w.dtype))[..., None]
    room = (low + high - 2 * x).mul_(direction).add_(high - low).mul_(0.5).clamp_(min=0)
    size, gap = w.abs(), gap.abs()
    if norm == "linf":
        moved = torch.minimum(_level(gap, size, room)[..., None], room)
    elif norm == "l2":
        stop = room / size.clamp(min=torch.finfo(size.dtype).tiny)
        moved = torch.minimum(_level(gap, size**2, stop)[..., None] * size, room)
    else:
        moved = _largest_first(size, gap, room)
    return moved.mul_(direction)


def _level(gap: Tensor, gain: Tensor, stop: Tensor) -> Tensor:
    """The s with sum_j gain_j min(s, stop_j) = gap, shape (..., B) as gap; gain is (B, D), stop (..., B, D).

    The sum is concave and piecewise linear in s. Newton's method from s = 0 thus never passes the solution and ends on
    it: each round stops at least one more value. Most rows take two or three rounds, which cost far less than a sort;
    the few that take more go on by themselves.
    """
    tiny, planes = torch.finfo(gain.dtype).tiny, len(gain)
    full = gain * stop
    whole, level = full.sum(-1), torch.zeros_like(gap)
    s, rows = level, None  # all of them at first
    while True:
        # A comparison written as numbers, and products with them, cost a tenth of booleans and `torch.where`.
        moving = torch.gt(stop, s[..., None], out=torch.empty_like(stop))
        slope = (moving * gain).sum(-1)
        spent = whole - moving.mul_(full).sum(-1)
        # A plane out of reach: any level beyond the last stop will do, as long as it is finite.
        ahead = torch.maximum(s, ((gap - spent) / slope.clamp(min=tiny)).clamp(max=1 / tiny**0.5))
        further = ahead > s  # nowhere where a NaN, which is above nothing, came in
        left = int(further.sum())
        if left == 0:
            return level
        if rows is None:
            level = ahead
        else:
            level.view(-1)[rows] = ahead
        s = ahead
        if 2 * left < further.numel():
            chosen = further.flatten().nonzero()[:, 0]
            rows = chosen if rows is None else rows[chosen]
            gain = gain.expand_as(stop).flatten(0, -2)[chosen] if stop.ndim == 2 else gain[chosen % planes]
            s, gap, whole = (t.flatten()[chosen] for t in (s, gap, whole))
            stop, full = (t.flatten(0, -2)[chosen] for t in (stop, full))


def _largest_first(size: Tensor, gap: Tensor, room: Tensor) -> Tensor:
    """Move all of the room of the values with the largest size, until their share of the gap is spent."""
    ordered, order = size.sort(-1, descending=True)
    order = order.expand_as(room)
    room = room.gather(-1, order)
    full = ordered * room
    left = (gap[..., None] - (full.cumsum(-1) - full)).clamp(min=0)
    moved = torch.minimum(left / ordered.clamp(min=torch.finfo(size.dtype).tiny), room)
    return torch.zeros_like(room).scatter(-1, order, moved)
