"""What identifies a model and its data: sha256 over names, shapes, types and values."""

import hashlib
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def hash_tensors(tensors: Mapping[str, object]) -> str:
    """sha256 of named tensors, in the given order; other values count as they print.

    >>> hash_tensors({"x": torch.zeros(2)}) == hash_tensors({"x": torch.zeros(1, 2)})
    False
    """
    digest = hashlib.sha256()
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            flat = value.detach().to("cpu").contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return digest.hexdigest()


def hash_model(model: nn.Module) -> str:
    """sha256 of the printed structure and the state, without the code of `forward`."""
    return hash_tensors({"structure": structure_of(model), **model.state_dict()})


def structure_of(model: nn.Module) -> str:
    """The printed structure of a model, the same in every process."""
    # Functions print with their address in memory, which says nothing about the model.
    return re.sub(r"0x[0-9a-fA-F]+", "", repr(model))
