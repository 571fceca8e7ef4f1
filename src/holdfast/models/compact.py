"""Compact model files: a safetensors file in which sparse and binary weights take few bits.

A weight of a binary sub-network takes one bit for its sign and, at 1 % kept, about eight for its place. `load_model`
reads the file like any other, to the same weights bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import InputError, StorageError
from holdfast.models.disk import State, load_model, write_model
from holdfast.models.masked.build import pruned
from holdfast.models.packed import pack_state


@dataclass(frozen=True)
class Compact:
    """What a compact file takes.

    Attributes:
        path: the file.
        size: its bytes.
        dense: bytes of all tensors of the network, as they are in memory.
        weights, kept: number of weights in packed matrices and kernels, and how many of them are not 0.
        tensors: bytes of each packed tensor, by name, and of the same tensor in memory.
    """

    path: Path
    size: int
    dense: int
    weights: int
    kept: int
    tensors: dict[str, tuple[int, int]]

    @property
    def ratio(self) -> float:
        """How many times smaller the file is than the tensors in memory."""
        return self.dense / self.size


def save_compact(model: nn.Module, path: str | Path, *, whole: bool = False, **metadata: Any) -> Compact:
    """Write the network without masks and pruned weights to a compact .safetensors file, and read it back to compare.

    Args:
        model: a sub-network, or any model whose weights are sparse or have one size. Masks are applied first.
        path: ends in .safetensors; its folder exists.
        whole: write a file also where no tensor can be packed, instead of refusing.
        metadata: JSON values to keep with the model.
    """
    plain = pruned(model)
    state = plain.state_dict()
    packed = pack_state(state)
    if not packed.about and not whole:
        raise InputError(
            "no weight of the model can be packed: none is sparse, and none has a single magnitude. Prune the model "
            "first, with [prune] in a recipe or holdfast.models.masked.masked"
        )
    path = write_model(plain, path, metadata, pack=pack_state)
    _check_same(state, load_model(path, None if hasattr(plain, "architecture") else pruned(model)).state_dict(), path)
    tensors = {name: (packed.size_of(name), _bytes_of(state[name])) for name in packed.about}
    layers = packed.about.values()
    kept, weights = sum(about["kept"] for about in layers), sum(prod(about["shape"]) for about in layers)
    dense = sum(_bytes_of(tensor) for tensor in state.values())
    return Compact(path, path.stat().st_size, dense, weights, kept, tensors)


def _check_same(state: State, read: Mapping[str, Tensor], path: Path) -> None:
    """Every bit of every tensor: a compact file that is not the network must not stay."""
    for name, tensor in state.items():
        ours, theirs = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, read[name]))
        if not torch.equal(ours, theirs):
            path.unlink()
            raise StorageError(f"'{name}' was not read back as it was written to {path}; is the disk sound?")


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
