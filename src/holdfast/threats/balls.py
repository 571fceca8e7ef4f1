"""Balls around the input, and boxes."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.threats.base import Threat, norm_2, number_text, per_input, written_as


@dataclass(frozen=True)
class Ball(Threat):
    """An Lp ball of radius `eps` around x."""

    eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise InputError(f"the budget of '{self.name}' must be a finite number >= 0, got {self.eps}")
        object.__setattr__(self, "eps", float(self.eps))

    @property
    def budget(self) -> float:
        return self.eps

    def budgets(self, count: int) -> list[Self]:
        """Twelve digits are enough, and keep the text short. Parts of a fraction read as such: 1.6/255 of 8/255."""
        parts = [replace(self, eps=float(f"{self.eps * i / count:.12g}")) for i in range(1, count)]
        top, slash, bottom = self.size.partition("/")
        if slash:
            parts = [written_as(part, f"{float(top) * i / count:.4g}/{bottom}") for i, part in enumerate(parts, 1)]
        return [*parts, self]

    def box(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x - self.eps).clamp(min=self.low), (x + self.eps).clamp(max=self.high)

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        return self._norm(x_adv - x)

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The clipped point where that lies in the ball; elsewhere each value moves as far as `_spend` allows."""
        clipped = self.clip(x_adv)
        too_far = self.distance(clipped, x) > self.eps
        if not bool(too_far.any()):
            return clipped
        flat, d = x.flatten(1), (x_adv - x).flatten(1)
        # How far each value can move in the direction of d before it leaves the valid range.
        room = torch.where(d >= 0, self.high - flat, flat - self.low).clamp(min=0)
        moved = self._spend(d.abs(), room) * d.sign()
        # Rounding can leave the norm a few ulps above eps; scaling towards x keeps every value in range.
        norm = self._norm(moved)[:, None]
        moved = moved * (self.eps / norm.clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=1)
        return torch.where(per_input(too_far, x), self.clip(x + moved.view_as(x)), clipped)

    @staticmethod
    @abstractmethod
    def _norm(d: Tensor) -> Tensor:
        """The norm of changes (B, ...), shape (B,)."""

    def _spend(self, size: Tensor, room: Tensor) -> Tensor:
        """Sizes of the changes (B, n) in the ball nearest to changes of `size`, each of at most `room`."""
        raise NotImplementedError

    def _size_text(self) -> str:
        return number_text(self.eps)


@dataclass(frozen=True)
class Linf(Ball):
    """Each value may change by at most `eps`.

    >>> str(Linf(8 / 255))
    'linf:8/255'
    """

    name: ClassVar[str] = "linf"

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        lower, upper = self.box(x)
        return torch.minimum(torch.maximum(x_adv, lower), upper)

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        u = noise.uniform(x.shape[1:], x.dtype)
        return self.project(x + self.eps * (2 * u - 1), x)

    @staticmethod
    def _norm(d: Tensor) -> Tensor:
        return d.abs().flatten(1).amax(1)

    def dual_norm(self, g: Tensor) -> Tensor:
        return g.flatten(1).abs().sum(1)


@dataclass(frozen=True)
class L2(Ball):
    """The Euclidean norm of the change is at most `eps`."""

    name: ClassVar[str] = "l2"

    def _spend(self, size: Tensor, room: Tensor) -> Tensor:
        """The nearest point moves value i by min(s |d_i|, room_i): find the s in [0, 1] that spends the budget.

        The norm is piecewise smooth and increasing in s, with a kink at each room_i / |d_i|: sort the kinks, solve the
        quadratic on the piece where the budget is met.
        """
        tiny = torch.finfo(size.dtype).tiny
        kink, order = (room / size.clamp(min=tiny)).sort(1)
        room_2 = room.gather(1, order).square()
        size_2 = size.gather(1, order).square()
        # With the first k values stopped at their room: norm^2 = sum_{i<k} room_i^2 + s^2 sum_{i>=k} size_i^2.
        stopped = room_2.cumsum(1) - room_2
        moving = size_2.sum(1, keepdim=True) - (size_2.cumsum(1) - size_2)
        spent = stopped + kink.square() * moving.clamp(min=0)
        piece = (spent < self.eps**2).sum(1, keepdim=True).clamp(max=size.shape[1] - 1)
        left = (self.eps**2 - stopped.gather(1, piece)).clamp(min=0)
        s = (left / moving.gather(1, piece).clamp(min=tiny)).sqrt().clamp(max=1)
        return torch.minimum(s * size, room)

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        d = noise.normal(x.shape[1:], x.dtype)
        radius = noise.fork(0).uniform((1,), x.dtype)[:, 0] ** (1 / max(d[0].numel(), 1))
        scale = self.eps * radius / norm_2(d).clamp(min=torch.finfo(x.dtype).tiny)
        return self.clip(x + per_input(scale, x) * d)

    @staticmethod
    def _norm(d: Tensor) -> Tensor:
        return norm_2(d)

    def dual_norm(self, g: Tensor) -> Tensor:
        return norm_2(g)

    def _rounding(self, x: Tensor) -> float:
        return math.sqrt(x[0].numel())


@dataclass(frozen=True)
class L1(Ball):
    """The sum of the absolute changes is at most `eps`."""

    name: ClassVar[str] = "l1"

    def _spend(self, size: Tensor, room: Tensor) -> Tensor:
        """The nearest point moves value i by min(max(|d_i| - t, 0), room_i) for one threshold t >= 0.

        The total is piecewise linear and decreasing in t, with kinks at |d_i| and |d_i| - room_i: sort them, and
        interpolate on the piece where the budget is met (Croce and Hein, "Mind the box", 2021).
        """
        full = (size - room).clamp(min=0)
        kink, order = torch.cat([size, full], 1).sort(1, descending=True)
        # Going down in t, the slope gains one at size_i (the value starts to move) and loses it at |d_i| - room_i.
        slope = torch.cat([torch.ones_like(size), -torch.ones_like(full)], 1).gather(1, order)
        step = kink[:, :-1] - kink[:, 1:]
        total = torch.cat([torch.zeros_like(size[:, :1]), (slope.cumsum(1)[:, :-1] * step).cumsum(1)], 1)
        piece = ((total <= self.eps).sum(1, keepdim=True) - 1).clamp(min=0)
        active = slope.cumsum(1).gather(1, piece).clamp(min=1)
        t = kink.gather(1, piece) - (self.eps - total.gather(1, piece)) / active
        return torch.minimum((size - t.clamp(min=0)).clamp(min=0), room)

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        """Uniform in the ball: d exponential spacings of d + 1, with random signs, then clipped to the range."""
        count = x[0].numel()
        e = -noise.uniform((count + 1,), x.dtype).log()
        signs = 2.0 * (noise.fork(0).bits((count,)) & 1) - 1
        d = self.eps * e[:, :count] / e.sum(1, keepdim=True) * signs.to(x.dtype)
        return self.clip(x + d.view_as(x))

    @staticmethod
    def _norm(d: Tensor) -> Tensor:
        return d.abs().flatten(1).sum(1)

    def dual_norm(self, g: Tensor) -> Tensor:
        return g.flatten(1).abs().amax(1)

    def _rounding(self, x: Tensor) -> float:
        return float(x[0].numel())


@dataclass(frozen=True, eq=False)
class Box(Threat):
    """Each value may change by at most its own `radius`, a tensor with the shape of one input or of the batch.

    A radius vector has no text form; `str()` describes it only. A radius for each input of a batch, `batched=True`,
    is for bounds and certificates; attacks take one radius for all.
    """

    radius: Tensor
    batched: bool = False
    name: ClassVar[str] = "box"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not bool(torch.isfinite(self.radius).all()) or bool((self.radius < 0).any()):
            raise InputError("every entry of the radius of a Box must be a finite number >= 0")

    def _radius_for(self, x: Tensor) -> Tensor:
        expected = x.shape if self.batched else x.shape[1:]
        if self.radius.shape != expected:
            raise InputError(
                f"the radius of the Box has shape {tuple(self.radius.shape)}; expected {tuple(expected)}. "
                "One radius for all inputs has the shape of one input; Box(radius, batched=True) has one for each."
            )
        return self.radius.to(x)

    def select(self, selection: Tensor | slice) -> Self:
        return replace(self, radius=self.radius[selection]) if self.batched else self

    @property
    def budget(self) -> float:
        """One: the distance is measured relative to the radius of each value."""
        return 1.0

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        lower, upper = self.box(x)
        return torch.minimum(torch.maximum(x_adv, lower), upper)

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        u = noise.uniform(x.shape[1:], x.dtype)
        return self.project(x + self._radius_for(x) * (2 * u - 1), x)

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Largest change relative to the radius; a change where the radius is zero counts as infinite."""
        change, radius = (x_adv - x).abs(), self._radius_for(x).expand_as(x)
        rounding = torch.finfo(x.dtype).eps * max(abs(self.low), abs(self.high))
        ratio = (change - rounding).clamp(min=0) / radius
        return torch.where(change <= rounding, torch.zeros_like(ratio), ratio).flatten(1).amax(1)

    def dual_norm(self, g: Tensor) -> Tensor:
        return (g.abs() * self._radius_for(g)).flatten(1).sum(1)

    def box(self, x: Tensor) -> tuple[Tensor, Tensor]:
        radius = self._radius_for(x)
        return (x - radius).clamp(min=self.low), (x + radius).clamp(max=self.high)

    def budgets(self, count: int) -> list[Self]:
        return [replace(self, radius=self.radius * (i / count)) for i in range(1, count)] + [self]

    def _size_text(self) -> str:
        return f"[{self.radius.min():.4g}, {self.radius.max():.4g}]"
