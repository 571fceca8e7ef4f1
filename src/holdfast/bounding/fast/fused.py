"""Steps of certified training with a backward pass of their own: fewer passes over large tensors than autograd takes.

Each function returns what the plain tensor program of its name does, and so do its gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from holdfast.bounding.fast.layout import channels_last
from holdfast.utils.reference import is_reference


def wanted(sound: bool) -> bool:
    """True for a step of training, whose gradients are worth a pass of their own."""
    return torch.is_grad_enabled() and not sound and not is_reference()


class _Halves(Function):
    """See `halves`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        centre = torch.lerp(lower, upper, 0.5)
        return centre, centre - lower

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        upper = torch.lerp(g, h, 0.5)
        return upper - h, upper


def halves(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """The centre and the radius of boxes: (lower + upper) / 2 and (upper - lower) / 2, each in one pass."""
    if is_reference():
        return (lower + upper) / 2, (upper - lower) / 2
    centre, radius = _Halves.apply(lower, upper)  # type: ignore[no-untyped-call]
    if lower.ndim == 4 and lower.stride(1) == 1:  # which is lost in the sums of grey images
        centre, radius = channels_last(centre), channels_last(radius)
    return centre, radius


class _Ends(Function):
    """See `ends`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(middle: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        return middle - spread, middle + spread

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h + g, h - g


def ends(middle: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of boxes: middle - spread and middle + spread, of one shape."""
    if is_reference():
        return middle - spread, middle + spread
    lower, upper = _Ends.apply(middle, spread)  # type: ignore[no-untyped-call]
    return lower, upper


def _lies_last(a: Tensor) -> bool:
    """Whether the channels of maps (B, M, C, H, W) are neighbours in memory."""
    return a.ndim == 5 and a.stride(2) == 1 < a.shape[2]


def _in_rows(a: Tensor, last: bool) -> Tensor:
    """(B, M, *shape) as (B, M, n), for maps with the channels last if that is how they lie: nothing is moved then."""
    return a.permute(0, 1, 3, 4, 2).flatten(2) if last else a.flatten(2)


def _from_rows(rows: Tensor, shape: torch.Size, last: bool) -> Tensor:
    """Back from `_in_rows` to (B, M, *shape)."""
    if not last:
        return rows.view(shape)
    b, m, c, h, w = shape
    return rows.view(b, m, h, w, c).permute(0, 1, 4, 2, 3)


BLOCK = 2**18
"""Coefficients at a time: what is computed on the way to a result then stays in the cache."""


class _Bend(Function):
    """See `bend`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, low: Tensor, up: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        carried, added = torch.empty_like(a), a.new_empty(a.shape[:2])
        last, rise = _lies_last(a), up - low
        for some in _blocks(a):
            negative = a[some].clamp(max=0)
            torch.mul(a[some], low[some], out=carried[some]).addcmul_(negative, rise[some])
            added[some] = torch.bmm(_in_rows(shift[some], last), _in_rows(negative, last).mT)[:, 0]
        ctx.save_for_backward(a, low, up, shift)
        return carried, added

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor | None, ...]:
        a, low, up, shift = ctx.saved_tensors
        need_a, need_low, need_up, need_shift = ctx.needs_input_grad
        last, rise = _lies_last(a), up - low
        grad_a = torch.empty_like(a) if need_a else None
        grad_low, grad_up, grad_shift = (
            torch.empty_like(v) if need else None for v, need in ((low, need_low), (up, need_up), (shift, need_shift))
        )
        for some in _blocks(a):
            negative = a[some].clamp(max=0)
            if grad_up is not None:
                torch.sum(g[some] * negative, 1, keepdim=True, out=grad_up[some])
            if grad_low is not None:
                grad_low[some] = (g[some] * (a[some] - negative)).sum_to_size(low[some].shape)
            if grad_shift is not None:
                rows = torch.bmm(h[some, None], _in_rows(negative, last))
                grad_shift[some] = _from_rows(rows, shift[some].shape, last)
            if grad_a is not None:
                side = torch.lt(negative, 0, out=negative)  # 1 where the line above is taken
                torch.addcmul(low[some], side, rise[some], out=grad_a[some]).mul_(g[some])
                grad_a[some].addcmul_(side.mul_(shift[some]), h[some].view(-1, h.shape[1], *[1] * (g.ndim - 2)))
        return grad_a, grad_low, grad_up, grad_shift


def _blocks(a: Tensor) -> list[slice]:
    """The inputs in blocks, at least one at a time; all at once where there is no cache to think of."""
    if a.device.type != "cpu":
        return [slice(None)]
    size = max(1, BLOCK * len(a) // max(1, a.numel()))
    return [slice(i, i + size) for i in range(0, len(a), size)]


def bend(a: Tensor, low: Tensor, up: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients before an activation, and what its lines add: a+ low + a- up, and <a-, shift> for every row.

    a+ and a- are the positive and the negative part of the coefficients after it.

    Args:
        a: (B, M, *shape).
        low: slope of the line below, which passes through 0; (B, 1 or M, *shape).
        up: slope of the line above, (B, 1, *shape).  shift: its intercept, (B, 1, *shape).

    Returns:
        (B, M, *shape) and (B, M).
    """
    carried, added = _Bend.apply(a, low, up, shift)  # type: ignore[no-untyped-call]
    return carried, added


class _Box(Function):
    """See `box_minimum`."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        # The corner where the minimum lies, upper - 1[c > 0] (upper - lower), is also the gradient.
        corner = torch.gt(c, 0, out=torch.empty_like(c)).mul_(lower - upper).add_(upper)
        ctx.save_for_backward(corner)
        value: Tensor = torch.linalg.vecdot(c.flatten(2), corner.flatten(2))
        return value

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (corner,) = ctx.saved_tensors
        return corner * g.view(*g.shape, *[1] * (corner.ndim - 2)), None, None


def box_minimum(c: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """min of <c, x'> over the box for every row, (B, M); c (B, M, *shape), the ends (B, *shape) without gradients."""
    value: Tensor = _Box.apply(c, lower[:, None], upper[:, None])  # type: ignore[no-untyped-call]
    return value
