"""Patches: all values under one mask may change, wherever the adversary puts it."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.threats.base import Threat, images
from holdfast.threats.patch_shapes import shape_masks


@dataclass(frozen=True)
class Placed(Threat):
    """All values under one mask may take any valid value; the adversary puts the mask where she likes."""

    @abstractmethod
    def locations(self, shape: tuple[int, ...]) -> Tensor:
        """All placements inside an image of `shape` (C, H, W): (L, P), the last two columns the top left corner."""

    @abstractmethod
    def masks(self, locations: Tensor, shape: tuple[int, ...]) -> Tensor:
        """True under the mask at each of the locations (..., P), shape (..., 1, H, W), bool."""

    @abstractmethod
    def under(self, values: Tensor) -> Tensor:
        """Sum of the values (B, 1, H, W) under the mask at each location, (B, L)."""

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Keeps the change under the best placement: the one that holds the most of its squared size."""
        change = (self.clip(x_adv) - images(x, str(self))).square().sum(1, keepdim=True)
        best = self.locations(x.shape[1:]).to(x.device)[self.under(change).argmax(1)]
        return torch.where(self.masks(best, x.shape[1:]), self.clip(x_adv), x)

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        places = self.locations(images(x, str(self)).shape[1:]).to(x.device)
        chosen = places[noise.fork(0).integers(len(places))]
        content = self.low + (self.high - self.low) * noise.uniform(x.shape[1:], x.dtype)
        return torch.where(self.masks(chosen, x.shape[1:]), content, x)

    def dual_norm(self, g: Tensor) -> Tensor:
        """Largest sum of |g| under one placement (each value may change by one)."""
        return self.under(images(g, str(self)).abs().sum(1, keepdim=True)).amax(1)

    def box(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask may lie anywhere, so the one box around all placements is the whole valid range."""
        self.locations(images(x, str(self)).shape[1:])
        return torch.full_like(x, self.low), torch.full_like(x, self.high)

    def boxes(self, x: Tensor, locations: Tensor) -> tuple[Tensor, Tensor]:
        """One box per input and location (L, P), or (B, L, P): lower and upper of shape (B, L, C, H, W)."""
        mask = self.masks(locations.to(x.device), images(x, str(self)).shape[1:])
        mask = mask if mask.ndim == 5 else mask[None]
        wide = x[:, None]
        low, high = torch.full_like(wide, self.low), torch.full_like(wide, self.high)
        return torch.where(mask, low, wide), torch.where(mask, high, wide)


@dataclass(frozen=True)
class Patch(Placed):
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
        return _corners(self, self.height, self.width, shape)

    def masks(self, locations: Tensor, shape: tuple[int, ...]) -> Tensor:
        row = torch.arange(shape[-2], device=locations.device)
        column = torch.arange(shape[-1], device=locations.device)
        top, left = locations[..., :1], locations[..., 1:]
        in_rows = (row >= top) & (row < top + self.height)
        in_columns = (column >= left) & (column < left + self.width)
        return (in_rows[..., :, None] & in_columns[..., None, :]).unsqueeze(-3)

    def under(self, values: Tensor) -> Tensor:
        window = (self.height, self.width)
        return F.avg_pool2d(values, window, stride=1, divisor_override=1).flatten(1)

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Pixels in the patch if the change fits under it, else infinity."""
        changed = (x_adv != images(x, str(self))).any(1)
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

    def budgets(self, count: int) -> list[Self]:
        """Patches of the same aspect, from one pixel up."""
        longest = max(self.height, self.width)
        sides = sorted({round(longest * i / count) for i in range(1, count + 1)} - {0})
        smaller = [
            [max(1, round(whole * side / longest)) for whole in (self.height, self.width)] for side in sides[:-1]
        ]
        return [*(replace(self, height=height, width=width) for height, width in smaller), self]

    def _size_text(self) -> str:
        return f"{self.height}x{self.width}"


def _corners(threat: Threat, height: int, width: int, shape: tuple[int, ...]) -> Tensor:
    """Top left corners of a window of that size inside an image of `shape` (C, H, W), (L, 2), row by row."""
    rows, columns = shape[-2] - height + 1, shape[-1] - width + 1
    if rows < 1 or columns < 1:
        raise InputError(f"the threat '{threat}' does not fit into an image of {shape[-2]}x{shape[-1]} pixels")
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns))


@dataclass(frozen=True)
class PatchShape(Placed):
    """All values under one patch of another shape than a rectangle of given sides, such as a diamond of 13 pixels.

    A shape such as "line" is a family, of which the adversary may use any member; see `holdfast.threats.patch_shapes`.

    >>> str(PatchShape("diamond", 13)), PatchShape("line", 4).locations((1, 5, 6)).shape
    ('patch:diamond:13', torch.Size([27, 3]))
    """

    shape: str
    pixels: int
    name: ClassVar[str] = "patch-shape"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not shape_masks(self.shape, self.pixels):
            raise InputError(f"there is no {self.shape} of {self.pixels} pixels, or up to two more")

    @property
    def budget(self) -> float:
        """Number of pixels under the largest member of the family."""
        return max(float(mask.sum()) for mask in self._members())

    def _members(self) -> list[Tensor]:
        return shape_masks(self.shape, self.pixels)

    def locations(self, shape: tuple[int, ...]) -> Tensor:
        """Member of the family and top left corner, (L, 3)."""
        spots = [_corners(self, mask.shape[0], mask.shape[1], shape) for mask in self._members()]
        return torch.cat([F.pad(spot, (1, 0), value=member) for member, spot in enumerate(spots)])

    def masks(self, locations: Tensor, shape: tuple[int, ...]) -> Tensor:
        every = [F.pad(mask, (0, shape[-1] - mask.shape[1], 0, shape[-2] - mask.shape[0])) for mask in self._members()]
        row = torch.arange(shape[-2], device=locations.device) - locations[..., 1:2]
        column = torch.arange(shape[-1], device=locations.device) - locations[..., 2:]
        inside = (row >= 0)[..., :, None] & (column >= 0)[..., None, :]
        pixels = torch.stack(every).to(locations.device)
        member = locations[..., 0, None, None]
        found = pixels[member, row.clamp(min=0)[..., :, None], column.clamp(min=0)[..., None, :]]
        return (inside & found).unsqueeze(-3)

    def under(self, values: Tensor) -> Tensor:
        windows = [mask[None, None].to(values) for mask in self._members()]
        return torch.cat([F.conv2d(values, window).flatten(1) for window in windows], 1)

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Number of changed pixels if they all lie under one placement, else infinity."""
        changed = (x_adv != images(x, str(self))).any(1, keepdim=True).to(x.dtype)
        used = changed.flatten(1).sum(1)
        fits = (self.under(changed) == used[:, None]).any(1)
        return torch.where(fits, used, torch.full_like(used, math.inf))

    def budgets(self, count: int) -> list[Self]:
        """Only this one: a smaller diamond need not fit under a larger one."""
        return [self]

    def _size_text(self) -> str:
        return f"{self.shape}:{self.pixels}"

    def __str__(self) -> str:
        return "patch:" + super().__str__().partition(":")[2]
