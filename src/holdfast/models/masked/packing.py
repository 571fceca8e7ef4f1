"""Sparse tensors in few bytes: where the values are, their signs, and their sizes only where these differ.

The places of the kept values are gaps in a Rice code: a gap g = q 2^k + r is q zeros and a one, then the k bits of r,
with the k that takes the fewest bits. Zeros and ones of all gaps come first, then all remainders, so that both are read
at once. Near the entropy at densities below 10 %; where a plain bit map is shorter, that is used.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits = NDArray[np.uint8]
_LARGEST_K = 24


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor in parts: arrays by name, and what is needed to put them together (JSON values)."""

    parts: dict[str, Tensor]
    about: dict[str, Any]


def pack(tensor: Tensor) -> Packed | None:
    """The tensor in parts, or None where they would take no fewer bytes than the tensor does.

    `unpack` gives back every bit. That would lose the sign of a negative zero, so a tensor with one is not packed.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    flat = tensor.detach().cpu().flatten()
    kept = flat != 0
    if bool((flat[~kept].signbit()).any()) or not bool(kept.any()) or not bool(flat.isfinite().all()):
        return None
    parts: dict[str, Tensor] = {}
    about: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    about["kept"] = int(kept.sum())
    if not bool(kept.all()):
        parts["places"], about["code"] = _pack_places(kept.numpy())
    values = flat[kept]
    if bool((values.abs() == values[0].abs()).all()):
        parts["signs"], parts["size"] = _bytes((values < 0).numpy()), values[:1].abs()
    else:
        parts["values"] = values.clone()
    taken = sum(part.numel() * part.element_size() for part in parts.values())
    return Packed(parts, about) if taken < tensor.numel() * tensor.element_size() else None


def unpack(packed: Packed) -> Tensor:
    """The tensor as it was; a ValueError if the parts do not fit each other."""
    parts, about = packed.parts, packed.about
    shape, kept = [int(side) for side in about["shape"]], int(about["kept"])
    count = int(np.prod(shape, dtype=np.int64))
    dtype = getattr(torch, str(about["dtype"]))
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or not 0 < kept <= count:
        raise ValueError(f"it says {about}")
    values = parts["values"] if "values" in parts else _signed(parts["signs"], parts["size"], kept)
    if values.dtype != dtype or values.shape != (kept,):
        raise ValueError(f"it has {tuple(values.shape)} values of {values.dtype}, expected {kept} of {dtype}")
    if "places" not in parts:
        if kept != count:
            raise ValueError("the places of its values are missing")
        return values.reshape(shape).clone()
    flat = torch.zeros(count, dtype=dtype)
    flat[torch.from_numpy(_unpack_places(parts["places"], about["code"], kept, count))] = values
    return flat.reshape(shape)


def _signed(signs: Tensor, size: Tensor, kept: int) -> Tensor:
    negative = torch.from_numpy(_bits(signs, kept).astype(bool))
    return torch.where(negative, -size, size)


def _bytes(bits: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.packbits(bits.astype(np.uint8)))


def _bits(packed: Tensor, count: int) -> Bits:
    if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) != (count + 7) // 8:
        raise ValueError(f"it has {packed.numel()} bytes where {(count + 7) // 8} are expected")
    return np.unpackbits(packed.numpy(), count=count)


def _pack_places(kept: NDArray[np.bool_]) -> tuple[Tensor, dict[str, int]]:
    """Bytes that say where the values are, and the code: a bit map (k = -1), or gaps with k bits of remainder."""
    gaps = np.diff(np.flatnonzero(kept), prepend=-1) - 1
    lengths = [int((gaps >> k).sum()) + len(gaps) * (1 + k) for k in range(_LARGEST_K)]
    k = int(np.argmin(lengths))
    if lengths[k] >= len(kept):
        return _bytes(kept), {"k": -1, "unary": 0}
    unary = np.zeros(int((gaps >> k).sum()) + len(gaps), np.uint8)
    unary[np.cumsum((gaps >> k) + 1) - 1] = 1
    rest = (gaps[:, None] >> np.arange(k - 1, -1, -1)) & 1
    return _bytes(np.concatenate([unary, rest.astype(np.uint8).ravel()])), {"k": k, "unary": len(unary)}


def _unpack_places(packed: Tensor, code: dict[str, int], kept: int, count: int) -> NDArray[np.int64]:
    k, unary = int(code["k"]), int(code["unary"])
    if k < 0:
        places = np.flatnonzero(_bits(packed, count))
    elif not 0 <= k < _LARGEST_K or not kept <= unary <= kept + count:
        raise ValueError(f"it says {code}")
    else:
        bits = _bits(packed, unary + kept * k)
        ends = np.flatnonzero(bits[:unary])
        if len(ends) != kept:
            raise ValueError(f"it has the places of {len(ends)} values, expected {kept}")
        rest = bits[unary:].reshape(kept, k).astype(np.int64) @ (1 << np.arange(k - 1, -1, -1, dtype=np.int64))
        places = np.cumsum(((np.diff(ends, prepend=-1) - 1) << k) + rest + 1) - 1
    if len(places) != kept or (kept and places[-1] >= count):
        raise ValueError("the places of its values lie outside of it")
    return places.astype(np.int64)
