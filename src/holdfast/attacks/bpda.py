"""Backward pass differentiable approximation: the true value forwards, the gradient of a stand-in backwards."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import InputError

Transform = Callable[[Tensor], Tensor]


class _ValueAndGradient(torch.autograd.Function):
    """The first argument forwards, the gradient to the second one backwards."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, stand_in: Tensor) -> Tensor:
        del ctx, stand_in
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        del ctx
        return None, gradients[0]


class StraightThrough(nn.Module):
    """A preprocessing step with its own value and the gradient of a stand-in; the identity if none is given.

    Put it around a defence that rounds, masks, compresses or cuts the graph, and attack the model behind it:

        >>> defended = nn.Sequential(StraightThrough(lambda x: (x > 0.5).to(x.dtype)), nn.Linear(4, 2)).eval()
        >>> x = torch.rand(3, 4, requires_grad=True)
        >>> defended(x).sum().backward()
        >>> bool((x.grad == defended[1].weight.sum(0)).all())
        True

    Athalye, Carlini and Wagner, "Obfuscated gradients give a false sense of security", 2018.

    Args:
        transform: from (B, ...) to (B, ...), differentiable or not; a module or a function.
        backward: differentiable, from (B, ...) to the shape that `transform` returns, and close to it in value.
    """

    def __init__(self, transform: Transform, *, backward: Transform | None = None) -> None:
        super().__init__()
        self.transform = transform
        self.stand_in = backward

    def forward(self, x: Tensor) -> Tensor:
        """transform(x), shape as the transform gives it."""
        with torch.no_grad():
            value = self.transform(x)
        stand_in = x if self.stand_in is None else self.stand_in(x)
        if value.shape != stand_in.shape:
            raise InputError(
                f"the transform maps the shape {tuple(x.shape)} to {tuple(value.shape)}, its stand-in for the backward "
                f"pass to {tuple(stand_in.shape)}; give backward= a function with the same result shape"
            )
        result: Tensor = _ValueAndGradient.apply(value, stand_in)  # type: ignore[no-untyped-call]
        return result
