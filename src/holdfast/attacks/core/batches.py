"""A batch in chunks: their size, the random numbers of each input, and one result out of many."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import answer
from holdfast.attacks.fast.lean import Lean
from holdfast.errors import InputError
from holdfast.random import Noise

Result = TypeVar("Result")

LARGE_INPUT = 20_000
"""Values of an input from which on memory decides how many are worked on at a time."""
MEMORY = 3 << 28
"""Bytes that the values kept for one backward pass may take: audits of ResNet-50 at 224 x 224 stay below 4 GB then."""


def fitting(model: nn.Module, x: Tensor, most: int) -> int:
    """How many inputs, `most` or fewer, have room for a gradient: measured on the first one if inputs are large."""
    if x[0].numel() < LARGE_INPUT:
        return most
    forms = (model.full, model.rough or model.full) if isinstance(model, Lean) else (model,)
    return max(1, min(most, MEMORY // max(1, *(kept_bytes(form, x[:1]) for form in forms))))


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps between a forward pass over x and its backward pass, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = answer(model, x.detach().clone().requires_grad_(True))
    del kept  # only now may storages be used again
    return sum(sizes.values())


def noise_for(x: Tensor, seed: int, index: Tensor | None) -> Noise:
    """One source of random numbers for each input; they follow from its entry of `index`, or from its position."""
    noise = Noise(seed, torch.arange(len(x), device=x.device) if index is None else index.to(x.device))
    if len(noise) != len(x):
        raise InputError(f"index must have shape ({len(x)},), one entry per input, got {tuple(noise.index.shape)}")
    return noise


def concatenate(parts: Sequence[Result]) -> Result:
    """The results of several chunks, dataclasses of tensors, tuples and words, as the result of all their inputs."""

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], str):  # said of the whole batch
            return values[0]
        return torch.cat(values) if isinstance(values[0], Tensor) else tuple(item for value in values for item in value)

    kind: Any = type(parts[0])
    joined: Result = kind(**{f.name: join([getattr(part, f.name) for part in parts]) for f in fields(kind)})
    return joined
