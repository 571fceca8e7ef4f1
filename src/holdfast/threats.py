"""What the adversary may do. Attacks, certificates and training all take the same frozen object.

A threat is a set of inputs around x, intersected with the valid input range [low, high] that it carries. Tensors have
the shape (B, ...); every method treats the inputs of the batch independently.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Self

import torch
from torch import Tensor

from holdfast.errors import InputError, did_you_mean
from holdfast.random import Noise


def norm_2(values: Tensor) -> Tensor:
    """Euclidean norm of each input, (B, ...) -> (B,)."""
    norm: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1)
    return norm


def _per_input(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1, ...) so that it broadcasts against `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True)
class Threat(ABC):
    """Base of all threats; `low` and `high` are the valid range of every input value."""

    low: float = field(default=0.0, kw_only=True)
    high: float = field(default=1.0, kw_only=True)

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

    def __str__(self) -> str:
        valid = "" if (self.low, self.high) == (0.0, 1.0) else f"@{self.low:g}:{self.high:g}"
        return f"{self.name}:{self._size_text()}{valid}"


def _number_text(value: float) -> str:
    """Shortest text that parses back to the same float; pixels of 255 as fractions.

    >>> _number_text(8 / 255), _number_text(0.1)
    ('8/255', '0.1')
    """
    levels = round(value * 255)
    if 0 < levels < 255 and levels / 255 == value and len(repr(value)) > 6:
        return f"{levels}/255"
    return f"{int(value)}" if value == int(value) else repr(value)


@dataclass(frozen=True)
class _Ball(Threat):
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
        """Twelve digits are enough, and keep the text short."""
        return [replace(self, eps=float(f"{self.eps * i / count:.12g}")) for i in range(1, count)] + [self]

    def box(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x - self.eps).clamp(min=self.low), (x + self.eps).clamp(max=self.high)

    def _size_text(self) -> str:
        return _number_text(self.eps)

    def _room(self, d: Tensor, x: Tensor) -> Tensor:
        """How far each value of x can move in the direction of d before it leaves the valid range."""
        return torch.where(d >= 0, self.high - x, x - self.low)


@dataclass(frozen=True)
class Linf(_Ball):
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

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        return (x_adv - x).abs().flatten(1).amax(1)

    def dual_norm(self, g: Tensor) -> Tensor:
        return g.flatten(1).abs().sum(1)


@dataclass(frozen=True)
class L2(_Ball):
    """The Euclidean norm of the change is at most `eps`."""

    name: ClassVar[str] = "l2"

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The nearest point moves value i by min(s |d_i|, room_i): find the s in [0, 1] that spends the budget.

        The norm is piecewise smooth and increasing in s, with a kink at each room_i / |d_i|: sort the kinks, solve the
        quadratic on the piece where the budget is met.
        """
        clipped = self.clip(x_adv)
        too_far = self.distance(clipped, x) > self.eps
        if not bool(too_far.any()):
            return clipped
        d = (x_adv - x).flatten(1)
        size, room = d.abs(), self._room(d, x.flatten(1)).clamp(min=0)
        kink, order = (room / size.clamp(min=torch.finfo(x.dtype).tiny)).sort(1)
        room_2 = room.gather(1, order).square()
        size_2 = size.gather(1, order).square()
        # With the first k values stopped at their room: norm^2 = sum_{i<k} room_i^2 + s^2 sum_{i>=k} size_i^2.
        stopped = room_2.cumsum(1) - room_2
        moving = size_2.sum(1, keepdim=True) - (size_2.cumsum(1) - size_2)
        spent = stopped + kink.square() * moving.clamp(min=0)
        piece = (spent < self.eps**2).sum(1, keepdim=True).clamp(max=d.shape[1] - 1)
        left = (self.eps**2 - stopped.gather(1, piece)).clamp(min=0)
        s = (left / moving.gather(1, piece).clamp(min=torch.finfo(x.dtype).tiny)).sqrt().clamp(max=1)
        moved = torch.minimum(s * size, room) * d.sign()
        # Rounding can leave the norm a few ulps above eps; scaling towards x keeps every value in range.
        norm = norm_2(moved)[:, None]
        moved = moved * (self.eps / norm.clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=1)
        inside = self.clip(x + moved.view_as(x))
        return torch.where(_per_input(too_far, x), inside, clipped)

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        d = noise.normal(x.shape[1:], x.dtype)
        radius = noise.fork(0).uniform((1,), x.dtype)[:, 0] ** (1 / max(d[0].numel(), 1))
        scale = self.eps * radius / norm_2(d).clamp(min=torch.finfo(x.dtype).tiny)
        return self.clip(x + _per_input(scale, x) * d)

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        return norm_2(x_adv - x)

    def dual_norm(self, g: Tensor) -> Tensor:
        return norm_2(g)

    def _rounding(self, x: Tensor) -> float:
        return math.sqrt(x[0].numel())


@dataclass(frozen=True)
class L1(_Ball):
    """The sum of the absolute changes is at most `eps`."""

    name: ClassVar[str] = "l1"

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The nearest point moves value i by min(max(|d_i| - t, 0), room_i) for one threshold t >= 0.

        The total is piecewise linear and decreasing in t, with kinks at |d_i| and |d_i| - room_i: sort them, and
        interpolate on the piece where the budget is met (Croce and Hein, "Mind the box", 2021).
        """
        clipped = self.clip(x_adv)
        too_far = self.distance(clipped, x) > self.eps
        if not bool(too_far.any()):
            return clipped
        d = (x_adv - x).flatten(1)
        size, room = d.abs(), self._room(d, x.flatten(1)).clamp(min=0)
        full = (size - room).clamp(min=0)
        kink, order = torch.cat([size, full], 1).sort(1, descending=True)
        # Going down in t, the slope gains one at size_i (the value starts to move) and loses it at |d_i| - room_i.
        slope = torch.cat([torch.ones_like(size), -torch.ones_like(full)], 1).gather(1, order)
        step = kink[:, :-1] - kink[:, 1:]
        total = torch.cat([torch.zeros_like(d[:, :1]), (slope.cumsum(1)[:, :-1] * step).cumsum(1)], 1)
        piece = ((total <= self.eps).sum(1, keepdim=True) - 1).clamp(min=0)
        active = slope.cumsum(1).gather(1, piece).clamp(min=1)
        t = kink.gather(1, piece) - (self.eps - total.gather(1, piece)) / active
        moved = torch.minimum((size - t.clamp(min=0)).clamp(min=0), room) * d.sign()
        norm = moved.abs().sum(1, keepdim=True)
        moved = moved * (self.eps / norm.clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=1)
        inside = self.clip(x + moved.view_as(x))
        return torch.where(_per_input(too_far, x), inside, clipped)

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        """Uniform in the ball: d exponential spacings of d + 1, with random signs, then clipped to the range."""
        count = x[0].numel()
        e = -noise.uniform((count + 1,), x.dtype).log()
        signs = 2.0 * (noise.fork(0).bits((count,)) & 1) - 1
        d = self.eps * e[:, :count] / e.sum(1, keepdim=True) * signs.to(x.dtype)
        return self.clip(x + d.view_as(x))

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        return (x_adv - x).abs().flatten(1).sum(1)

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


def _images(x: Tensor, threat: str) -> Tensor:
    if x.ndim != 4:
        raise InputError(f"the threat '{threat}' needs images of shape (B, C, H, W), got {tuple(x.shape)}")
    return x


@dataclass(frozen=True)
class Patch(Threat):
    """All values inside one rectangle, anywhere in the image, may take any valid value.

    >>> Patch(5, 5).locations((1, 28, 28)).shape
    torch.Size([576, 2])
    """

    height: int
    width: int
    name: ClassVar[str] = "patch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.height < 1 or self.width < 1:
            raise InputError(f"a patch must be at least 1x1, got {self.height}x{self.width}")

    @property
    def budget(self) -> float:
        """Number of pixels under the patch."""
        return float(self.height * self.width)

    def locations(self, shape: tuple[int, ...]) -> Tensor:
        """Top-left corners (row, column) of all placements inside an image of `shape` (C, H, W), shape (L, 2)."""
        rows, columns = shape[-2] - self.height + 1, shape[-1] - self.width + 1
        if rows < 1 or columns < 1:
            raise InputError(f"the threat '{self}' does not fit into an image of {shape[-2]}x{shape[-1]} pixels")
        return torch.cartesian_prod(torch.arange(rows), torch.arange(columns))

    def masks(self, locations: Tensor, shape: tuple[int, ...]) -> Tensor:
        """True under the patch at each of the locations (..., 2), shape (..., 1, H, W), bool."""
        row = torch.arange(shape[-2], device=locations.device)
        column = torch.arange(shape[-1], device=locations.device)
        top, left = locations[..., :1], locations[..., 1:]
        in_rows = (row >= top) & (row < top + self.height)
        in_columns = (column >= left) & (column < left + self.width)
        return (in_rows[..., :, None] & in_columns[..., None, :]).unsqueeze(-3)

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Keeps the change under the best placement: the one that holds the most of its squared size."""
        change = (self.clip(x_adv) - _images(x, str(self))).square().sum(1, keepdim=True)
        held = torch.nn.functional.avg_pool2d(change, (self.height, self.width), stride=1).flatten(1)
        best = self.locations(x.shape[1:]).to(x.device)[held.argmax(1)]
        return torch.where(self.masks(best, x.shape[1:]), self.clip(x_adv), x)

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        places = self.locations(_images(x, str(self)).shape[1:]).to(x.device)
        chosen = places[noise.fork(0).integers(len(places))]
        content = self.low + (self.high - self.low) * noise.uniform(x.shape[1:], x.dtype)
        return torch.where(self.masks(chosen, x.shape[1:]), content, x)

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Pixels in the patch if the change fits under it, else infinity."""
        changed = (x_adv != _images(x, str(self))).any(1)
        height, width = self._extent(changed.any(2)), self._extent(changed.any(1))
        fits = (height <= self.height) & (width <= self.width)
        used = (height * width).to(x.dtype)
        return torch.where(fits, used, torch.full_like(used, math.inf))

    @staticmethod
    def _extent(changed: Tensor) -> Tensor:
        """From the first to the last True of each row of (B, N), zero where there is none."""
        size = changed.shape[1]
        first = changed.to(torch.int8).argmax(1)
        last = size - 1 - changed.flip(1).to(torch.int8).argmax(1)
        return torch.where(changed.any(1), last - first + 1, torch.zeros_like(first))

    def dual_norm(self, g: Tensor) -> Tensor:
        """Largest sum of |g| under one placement (each value may change by one)."""
        total = _images(g, str(self)).abs().sum(1, keepdim=True)
        pooled = torch.nn.functional.avg_pool2d(total, (self.height, self.width), stride=1)
        return pooled.flatten(1).amax(1) * (self.height * self.width)

    def box(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The patch may lie anywhere, so the one box around all placements is the whole valid range."""
        self.locations(_images(x, str(self)).shape[1:])
        return torch.full_like(x, self.low), torch.full_like(x, self.high)

    def boxes(self, x: Tensor, locations: Tensor) -> tuple[Tensor, Tensor]:
        """One box per input and location (L, 2), or (B, L, 2): lower and upper of shape (B, L, C, H, W)."""
        mask = self.masks(locations.to(x.device), _images(x, str(self)).shape[1:])
        mask = mask if mask.ndim == 5 else mask[None]
        wide = x[:, None]
        low, high = torch.full_like(wide, self.low), torch.full_like(wide, self.high)
        return torch.where(mask, low, wide), torch.where(mask, high, wide)

    def budgets(self, count: int) -> list[Self]:
        """Patches of the same aspect, from one pixel up."""
        longest = max(self.height, self.width)
        sides = sorted({round(longest * i / count) for i in range(1, count + 1)} - {0})
        smaller = [
            replace(
                self,
                height=max(1, round(self.height * side / longest)),
                width=max(1, round(self.width * side / longest)),
            )
            for side in sides[:-1]
        ]
        return [*smaller, self]

    def _size_text(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True)
class Sparse(Threat):
    """Any `k` pixels may take any valid value; a pixel counts once, whatever its number of channels.

    Inputs that are not images (B, C, H, W) count each value.
    """

    k: int
    name: ClassVar[str] = "sparse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 0:
            raise InputError(f"the number of pixels of 'sparse' must be >= 0, got {self.k}")

    @property
    def budget(self) -> float:
        return float(self.k)

    @staticmethod
    def per_pixel(values: Tensor) -> Tensor:
        """Sum over the channels, shape (B, pixels)."""
        return values.sum(1).flatten(1) if values.ndim == 4 else values.flatten(1)

    def keep(self, x_adv: Tensor, x: Tensor, score: Tensor) -> Tensor:
        """`x_adv` on the k pixels of highest score (B, pixels), `x` elsewhere."""
        k = min(self.k, score.shape[1])
        chosen = torch.zeros_like(score, dtype=torch.bool)
        chosen.scatter_(1, score.topk(k, dim=1).indices, True)
        mask = chosen.view(x.shape[0], 1, *x.shape[2:]) if x.ndim == 4 else chosen.view_as(x)
        return torch.where(mask, x_adv, x)

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        x_adv = self.clip(x_adv)
        return self.keep(x_adv, x, self.per_pixel((x_adv - x).square()))

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        content = self.low + (self.high - self.low) * noise.uniform(x.shape[1:], x.dtype)
        pixels = self.per_pixel(x[:1]).shape[1]
        return self.keep(content, x, noise.fork(0).uniform((pixels,)))

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        return (self.per_pixel((x_adv != x).to(x.dtype)) > 0).sum(1).to(x.dtype)

    def dual_norm(self, g: Tensor) -> Tensor:
        """Sum of |g| over the k pixels where it is largest (each value may change by one)."""
        total = self.per_pixel(g.abs())
        return total.topk(min(self.k, total.shape[1]), dim=1).values.sum(1)

    def box(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Any pixel may change, so the enclosing box is the whole valid range (for k = 0, x itself)."""
        if self.k == 0:
            return x, x
        return torch.full_like(x, self.low), torch.full_like(x, self.high)

    def budgets(self, count: int) -> list[Self]:
        sizes = sorted({round(self.k * i / count) for i in range(1, count)} - {0, self.k})
        return [*(replace(self, k=k) for k in sizes), self]

    def _size_text(self) -> str:
        return str(self.k)


_BALLS: dict[str, type[_Ball]] = {"linf": Linf, "l2": L2, "l1": L1}
NAMES: tuple[str, ...] = (*_BALLS, "patch", "sparse")


def threat(text: str | Threat) -> Threat:
    """Read a threat from text: `linf:8/255`, `l2:0.5`, `patch:5x5`, `sparse:10`; `@low:high` sets the valid range.

    A threat is returned as it is, so that every function takes both.

    >>> threat("linf:8/255") == Linf(8 / 255)
    True
    >>> threat("l2:0.5@-1:1")
    L2(low=-1.0, high=1.0, eps=0.5)
    """
    if isinstance(text, Threat):
        return text
    if not isinstance(text, str):
        raise InputError(f"the threat must be one of hf.Linf, hf.L2, ..., or a text such as 'linf:8/255', got {text!r}")
    body, _, valid = text.strip().lower().partition("@")
    name, _, size = body.partition(":")
    if name not in NAMES:
        raise InputError(f"unknown threat '{name}' in '{text}'. " + did_you_mean(name, NAMES))
    try:
        low, high = (float(Fraction(v)) for v in valid.split(":")) if valid else (0.0, 1.0)
        if name in _BALLS:
            return _BALLS[name](_parse_number(size), low=low, high=high)
        if name == "sparse":
            return Sparse(int(size), low=low, high=high)
        height, width = (int(side) for side in size.split("x"))
        return Patch(height, width, low=low, high=high)
    except InputError:
        raise
    except (ValueError, ZeroDivisionError):
        raise InputError(
            f"cannot read the threat '{text}'. Examples: linf:8/255, l2:0.5, l1:10, patch:5x5, sparse:10; "
            "add @low:high for a valid range other than 0 to 1, such as linf:0.1@-1:1."
        ) from None


def _parse_number(text: str) -> float:
    """`0.1`, `1e-3` or the fraction `8/255`, which is divided in floating point like the Python expression."""
    top, slash, bottom = text.partition("/")
    return float(top) / float(bottom) if slash else float(top)
