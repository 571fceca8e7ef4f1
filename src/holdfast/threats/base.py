"""What every threat can do, and helpers that several threats share."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.random import Noise

T = TypeVar("T", bound="Threat")


def norm_2(values: Tensor) -> Tensor:
    """Euclidean norm of each input, (B, ...) -> (B,)."""
    norm: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1)
    return norm


def per_input(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1, ...) so that it broadcasts against `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True)
class Threat(ABC):
    """Base of all threats; `low` and `high` are the valid range of every input value."""

    low: float = field(default=0.0, kw_only=True)
    high: float = field(default=1.0, kw_only=True)
    # The size as the user wrote it, such as 2/255: only for reading, so equal threats stay equal whatever it says.
    _written: str = field(default="", init=False, compare=False, repr=False)

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InputError(f"the valid range must satisfy low < high, got [{self.low}, {self.high}]")

    @abstractmethod
    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The point of the set nearest to `x_adv` (Euclidean), shape of x."""

    @abstractmethod
    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        """A random point of the set, shape of x."""

    @abstractmethod
    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """How much of the budget `x_adv` uses, in the threat's own unit, shape (B,)."""

    @abstractmethod
    def dual_norm(self, g: Tensor) -> Tensor:
        """Largest <g, d> over perturbations d of budget one (valid range ignored), shape (B,)."""

    @abstractmethod
    def box(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper corner of the smallest box that encloses the set, shape of x each."""

    @abstractmethod
    def budgets(self, count: int) -> list[Self]:
        """Up to `count` nested threats of growing budget; the last one is this threat."""

    @property
    @abstractmethod
    def budget(self) -> float:
        """The budget as one number, for axes and tables."""

    def select(self, selection: Tensor | slice) -> Self:
        """The same threat for some of the inputs of a batch; differs only for a `Box` with a radius for each input."""
        return self

    def clip(self, x: Tensor) -> Tensor:
        """`x` clipped to the valid range."""
        return x.clamp(self.low, self.high)

    def contains(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """(B,) bool: is `x_adv` in the set around `x`, up to float rounding of the norm?"""
        values = x_adv.flatten(1)
        in_range = ((values >= self.low) & (values <= self.high)).all(1)
        slack = 1 + 16 * torch.finfo(x.dtype).eps
        # The difference of two numbers in range is itself rounded by at most half an ulp of the larger one.
        rounding = torch.finfo(x.dtype).eps * max(abs(self.low), abs(self.high)) * self._rounding(x)
        return in_range & (self.distance(x_adv, x) <= self.budget * slack + rounding)

    def _rounding(self, x: Tensor) -> float:
        """Error of the distance through rounding of x_adv - x, in ulps of the range."""
        return 1.0

    @abstractmethod
    def _size_text(self) -> str: ...

    @property
    def size(self) -> str:
        """The budget as it was written, for people: "2/255", "5x5"."""
        return self._written or self._size_text()

    @property
    def canonical(self) -> str:
        """Text that is the same for equal threats, however they were written; for keys and files."""
        return f"{self.name}:{self._size_text()}{self._range_text()}"

    def _range_text(self) -> str:
        return "" if (self.low, self.high) == (0.0, 1.0) else f"@{self.low:g}:{self.high:g}"

    def __str__(self) -> str:
        return f"{self.name}:{self.size}{self._range_text()}"


def number_text(value: float) -> str:
    """Shortest text that parses back to the same float; pixels of 255 as fractions.

    >>> number_text(8 / 255), number_text(0.1)
    ('8/255', '0.1')
    """
    levels = round(value * 255)
    if 0 < levels < 255 and levels / 255 == value and len(repr(value)) > 6:
        return f"{levels}/255"
    return f"{int(value)}" if value == int(value) else repr(value)


def images(x: Tensor, threat: str) -> Tensor:
    """`x`, after a check that it is a batch of images."""
    if x.ndim != 4:
        raise InputError(f"the threat '{threat}' needs images of shape (B, C, H, W), got {tuple(x.shape)}")
    return x


def written_as(threat: T, size: str) -> T:
    """Give the threat, which nobody else has yet, the text of its size."""
    object.__setattr__(threat, "_written", size)
    return threat
