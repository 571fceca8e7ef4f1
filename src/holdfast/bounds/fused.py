"""Steps of certified training with a backward pass of their own: fewer passes over large tensors than autograd takes.

Each function returns what the plain tensor program of its name does, and so do its gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


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
    centre, radius = _Halves.apply(lower, upper)  # type: ignore[no-untyped-call]
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
    lower, upper = _Ends.apply(middle, spread)  # type: ignore[no-untyped-call]
    return lower, upper


class _Bend(Function):
    """See `bend`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, low: Tensor, up: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        negative = a.clamp(max=0)
        carried = torch.addcmul(a * low, negative, up - low)
        added = torch.bmm(shift.flatten(2), negative.flatten(2).mT)[:, 0]
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, negative, low, up, shift)
        return carried, added

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor | None, ...]:
        a, negative, low, up, shift = ctx.saved_tensors
        need_a, need_low, need_up, need_shift = ctx.needs_input_grad
        grad_a = grad_low = grad_up = grad_shift = None
        if need_a:
            side = torch.lt(negative, 0, out=torch.empty_like(negative))  # 1 where the line above is taken
            grad_a = torch.addcmul(low, side, up - low).mul_(g)
            grad_a.addcmul_(side.mul_(shift), h.view(*h.shape, *[1] * (g.ndim - 2)))
        if need_low:
            grad_low = (g * (a - negative)).sum_to_size(low.shape)
        if need_up:
            grad_up = (g * negative).sum(1, keepdim=True)
        if need_shift:
            grad_shift = torch.bmm(h[:, None], negative.flatten(2)).view_as(shift)
        return grad_a, grad_low, grad_up, grad_shift


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
