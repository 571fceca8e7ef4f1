"""What is explained: one number per input, its gradient in chunks, and what all methods are told by the front door."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import input_gradient, look
from holdfast.checks import check_labels
from holdfast.errors import InputError, did_you_mean
from holdfast.random import Noise
from holdfast.utils.reference import is_reference

Quantity = Literal["logit", "probability", "margin"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


@dataclass(frozen=True, eq=False)
class Setting:
    """What the front door hands to every method.

    Attributes:
        quantity: what is explained; see `value`.
        low, high: the valid range of every input value.
        noise: random numbers that belong to the inputs.
        chunk: points in one pass through the model.
    """

    quantity: Quantity
    low: float
    high: float
    noise: Noise
    chunk: int

    def select(self, rows: Tensor) -> "Setting":
        """The same for some of the inputs."""
        return Setting(self.quantity, self.low, self.high, self.noise[rows], self.chunk)


def check_quantity(quantity: str) -> None:
    """Refuse what cannot be explained."""
    if quantity not in QUANTITIES:
        raise InputError(f"unknown quantity '{quantity}'. " + did_you_mean(str(quantity), QUANTITIES))


def check_outputs(logits: Tensor, y: Tensor) -> None:
    """Refuse what is not logits (B, K) of at least two classes, and labels beyond them."""
    if logits.ndim != 2 or len(logits) != len(y) or logits.shape[1] < 2:
        raise InputError(
            f"the model must return logits of shape ({len(y)}, K) with K >= 2, got {tuple(logits.shape)}; for a binary "
            "score z give the two logits (0, z)"
        )
    check_labels(y, len(y), logits.shape[1])


def value(quantity: Quantity) -> Callable[[Tensor, Tensor], Tensor]:
    """The function (logits (B, K), y (B,)) -> (B,) that is explained.

    "logit": z_y. "probability": softmax(z)_y. "margin": z_y - max_{j != y} z_j, whose gradient is normal to the
    decision boundary.
    """

    def of(logits: Tensor, y: Tensor) -> Tensor:
        check_outputs(logits, y)
        if quantity == "probability":
            logits = logits.softmax(1)
        column = y.unsqueeze(1)
        own = logits.gather(1, column).squeeze(1)
        return own - logits.scatter(1, column, -torch.inf).amax(1) if quantity == "margin" else own

    return of


@torch.no_grad()
def predicted(model: nn.Module, x: Tensor, y: Tensor, chunk: int) -> Tensor:
    """The predicted classes, (B,); refuse outputs that are no logits, and labels beyond them."""
    logits = torch.cat([model(part) for part in x.split(chunk)])
    check_outputs(logits, y)
    return logits.argmax(1)


def one_hot(logits: Tensor, y: Tensor) -> Tensor:
    """The gradient of z_y for the logits, (B, K)."""
    return torch.zeros_like(logits).scatter_(1, y.unsqueeze(1), 1.0)


def gradients_at(model: nn.Module, points: Tensor, y: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Gradient (shape of the points) and value (B,) of the quantity at (B, ...) points, in chunks."""
    of, quick = value(setting.quantity), setting.quantity == "logit" and not is_reference()
    slope = one_hot if quick else None
    if 0 < len(points) <= setting.chunk:
        return input_gradient(model, points, y, of, slope)[:2]
    parts = [
        input_gradient(model, points[i : i + setting.chunk], y[i : i + setting.chunk], of, slope)[:2]
        for i in range(0, len(points), setting.chunk)
    ]
    if not parts:
        return torch.zeros_like(points), points.new_zeros(0)
    return torch.cat([g for g, _ in parts]), torch.cat([v for _, v in parts])


@torch.no_grad()
def values_at(model: nn.Module, points: Tensor, y: Tensor, setting: Setting) -> Tensor:
    """Value (B,) of the quantity at (B, ...) points, in chunks."""
    of = value(setting.quantity)
    parts = [
        look(model, points[i : i + setting.chunk], y[i : i + setting.chunk], of)[0]
        for i in range(0, len(points), setting.chunk)
    ]
    return torch.cat(parts) if parts else points.new_zeros(0)


def pieces(inputs: int, draws: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Inputs x draws in parts of at most `chunk` points: pairs (some of the inputs, some of the draws).

    >>> list(pieces(3, 3, 6))
    [(slice(0, 3, None), slice(0, 2, None)), (slice(0, 3, None), slice(2, 3, None))]
    """
    for first in range(0, inputs, chunk):
        last = min(first + chunk, inputs)
        at_once = max(1, chunk // (last - first))
        for draw in range(0, draws, at_once):
            yield slice(first, last), slice(draw, min(draw + at_once, draws))
