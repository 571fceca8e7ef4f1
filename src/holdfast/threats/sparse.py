"""A few pixels, wherever the adversary likes."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.threats.base import Threat


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
