"""A batch in chunks: the random numbers of each input, and one result out of many."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.random import Noise

Result = TypeVar("Result")


def noise_for(x: Tensor, seed: int, index: Tensor | None) -> Noise:
    """One source of random numbers for each input; they follow from its entry of `index`, or from its position."""
    noise = Noise(seed, torch.arange(len(x), device=x.device) if index is None else index.to(x.device))
    if len(noise) != len(x):
        raise InputError(f"index must have shape ({len(x)},), one entry per input, got {tuple(noise.index.shape)}")
    return noise


def concatenate(parts: Sequence[Result]) -> Result:
    """The results of several chunks, dataclasses of tensors and tuples, as the result of all their inputs."""

    def join(values: list[Any]) -> Any:
        return torch.cat(values) if isinstance(values[0], Tensor) else tuple(item for value in values for item in value)

    kind: Any = type(parts[0])
    joined: Result = kind(**{f.name: join([getattr(part, f.name) for part in parts]) for f in fields(kind)})
    return joined
