"""Random numbers that belong to an input, not to a batch.

An attack must give the same answer whether its inputs come one at a time, in a batch of 256, or after others have
left the batch. `Noise` therefore hashes (seed, index of the input, draw, element) with SplitMix64's finaliser (Steele,
Lea and Flood, "Fast splittable pseudorandom number generators", 2014): no state, the same on every device, vectorised.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

# In place below, on tensors that nobody else holds, and a few inputs at a time: on a CPU the memory costs more than the
# sums, unless it lies in the cache.
_CACHE = 1 << 15


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts signed integers arithmetically."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = _shift_right(z, 30).bitwise_xor_(z).mul_(_MIX_1)
    z = _shift_right(z, 27).bitwise_xor_(z).mul_(_MIX_2)
    return _shift_right(z, 31).bitwise_xor_(z)


@dataclass(frozen=True, eq=False)
class Noise:
    """A source of random numbers for the inputs `index`, fixed by `seed`.

    Args:
        seed: any integer.
        index: what identifies each input, shape (B,), int64: its position in the data set.
        stream: separates the uses of one seed (restart 0, restart 1, augmentation, ...); see `fork`.

    >>> noise = Noise(0, torch.arange(4))
    >>> bool((noise.uniform((3,))[1:3] == noise[1:3].uniform((3,))).all())
    True
    """

    seed: int
    index: Tensor
    stream: int = 0

    @classmethod
    def for_batch(cls, seed: int, count: int, device: torch.device | str = "cpu") -> "Noise":
        """Noise for inputs 0 ... count-1."""
        return cls(seed, torch.arange(count, device=device))

    def __getitem__(self, selection: Tensor | slice) -> "Noise":
        """The same noise for some of the inputs (mask, indices or slice)."""
        return Noise(self.seed, self.index[selection], self.stream)

    def __len__(self) -> int:
        return int(self.index.shape[0])

    def fork(self, number: int) -> "Noise":
        """An independent source for another use, such as restart `number`."""
        return Noise(self.seed, self.index, self.stream * 1_000_003 + number + 1)

    def bits(self, shape: Sequence[int]) -> Tensor:
        """Uniform 64-bit integers, shape (B, *shape)."""
        device = self.index.device
        count = math.prod(shape)
        key = _mix(torch.tensor([self.seed, self.stream], device=device) * _GOLDEN + _GOLDEN)
        per_input = _mix(self.index * _GOLDEN + key[0]) ^ key[1]
        element = torch.arange(1, count + 1, device=device) * _GOLDEN
        return _mix(per_input[:, None] + element).view(len(self), *shape)

    def _parts(self, shape: Sequence[int]) -> list["Noise"] | None:
        """The same noise in groups of inputs whose numbers fit into the cache; None where it does already."""
        count = max(1, _CACHE // max(1, math.prod(shape)))
        if len(self) <= count or self.index.device.type != "cpu":
            return None
        return [self[i : i + count] for i in range(0, len(self), count)]

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform on (0, 1), both ends excluded, shape (B, *shape)."""
        if (parts := self._parts(shape)) is not None:
            return torch.cat([part.uniform(shape, dtype) for part in parts])
        digits, wide = (52, torch.float64) if dtype == torch.float64 else (23, torch.float32)
        top = _shift_right(self.bits(shape), 64 - digits).to(wide)
        return top.add_(0.5).mul_(2.0**-digits).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal, shape (B, *shape), by inversion."""
        if (parts := self._parts(shape)) is not None:
            return torch.cat([part.normal(shape, dtype) for part in parts])
        u = self.uniform(shape, torch.float64)
        return u.mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2)).to(dtype)

    def generated_normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal, shape (B, *shape), from a generator of its own for each input.

        For some hundred numbers and more this is several times as quick as `normal`, but it differs between devices.
        """
        generator = torch.Generator(device=self.index.device)
        z = torch.empty(len(self), *shape, dtype=dtype, device=self.index.device)
        for row, seed in zip(z, (self.bits((1,))[:, 0] & 0xFFFFFFFF).tolist(), strict=True):
            row.normal_(generator=generator.manual_seed(seed))  # of which a CPU uses 32 bits
        return z

    def integers(self, high: int | Tensor, shape: Sequence[int] = ()) -> Tensor:
        """Uniform on 0 ... high-1, int64, shape (B, *shape)."""
        drawn = (self.uniform(shape, torch.float64) * high).long()
        return torch.minimum(drawn, torch.as_tensor(high, device=drawn.device) - 1)
