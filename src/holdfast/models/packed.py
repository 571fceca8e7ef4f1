"""The tensors of a model in parts: which are packed, and how a file says so."""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.models.masked.packing import Packed, pack, unpack
from holdfast.models.size import Sizes

State = dict[str, Tensor]
_SEPARATOR = "#"  # no name of a parameter holds it
LARGEST = 2**13
"""Values that a byte of a file may stand for. A kept weight takes at least two bytes at a rate of 0.9998."""


@dataclass(frozen=True, eq=False)
class PackedState:
    """Tensors as they are written: whole ones under their names, parts under NAME#PART; `about` describes the parts."""

    tensors: State
    about: dict[str, dict[str, Any]]

    def size_of(self, name: str) -> int:
        """Bytes of the parts of one tensor."""
        parts = [t for key, t in self.tensors.items() if key.startswith(name + _SEPARATOR)]
        return sum(part.numel() * part.element_size() for part in parts)

    @property
    def record(self) -> dict[str, Any]:
        """What the file has to say to be read: JSON values."""
        return {"tensors": self.about, "checksum": checksum(self.tensors)}


def pack_state(state: Mapping[str, Tensor]) -> PackedState:
    """Pack each matrix or kernel that gets smaller by it."""
    tensors: State = {}
    about: dict[str, dict[str, Any]] = {}
    for name, tensor in state.items():
        packed = None if _SEPARATOR in name or tensor.ndim < 2 else pack(tensor)
        if packed is None:
            tensors[name] = tensor
        else:
            about[name] = packed.about
            tensors |= {f"{name}{_SEPARATOR}{key}": part for key, part in packed.parts.items()}
    return PackedState(tensors, about)


def packed_sizes(sizes: Sizes, record: Mapping[str, Any], size: int) -> Sizes:
    """The shape of every unpacked tensor by name; a ValueError if a file of `size` bytes cannot hold that."""
    about = _about(record)
    whole = {name: shape for name, shape in sizes.items() if _SEPARATOR not in name}
    shapes = {name: tuple(int(side) for side in one["shape"]) for name, one in about.items()}
    values = sum(math.prod(shape) for shape in shapes.values())
    if values > LARGEST * size or any(side < 0 for shape in shapes.values() for side in shape):
        raise ValueError(f"its {size:,} bytes cannot hold the {values:,} values that it names")
    return {**whole, **shapes}


def unpack_state(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> State:
    """The tensors as they were; a ValueError if parts are missing, damaged or do not fit."""
    if checksum(tensors) != record.get("checksum"):
        raise ValueError("its checksum is wrong: the file was changed or is damaged")
    state = {name: tensor for name, tensor in tensors.items() if _SEPARATOR not in name}
    for name, about in _about(record).items():
        start = name + _SEPARATOR
        parts = {key.removeprefix(start): part for key, part in tensors.items() if key.startswith(start)}
        try:
            state[name] = unpack(Packed(parts, about))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the parts of '{name}' do not fit: {error!r}") from error
    return state


def _about(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    about = record.get("tensors")
    if not isinstance(about, dict) or not all(
        isinstance(one, dict) and isinstance(one.get("shape"), list) for one in about.values()
    ):
        raise ValueError("its record of packed tensors is not a table of shapes")
    return about


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """A checksum of all bytes, in the order of the names."""
    total = 0
    for name in sorted(tensors):
        content = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        total = zlib.crc32(content.tobytes(), zlib.crc32(name.encode(), total))
    return total
