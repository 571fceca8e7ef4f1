"""Random weights and scores of a sub-network."""

import math
from typing import Literal

import torch
from torch import Tensor

Weights = Literal["binary", "kaiming-constant", "kaiming-normal", "own"]
"""Weights under the mask: -1 and 1; +-sqrt(2 / (fan-in (1 - rate))); normal of that deviation; the model's own."""


def fan_in(weight: Tensor) -> int:
    """Inputs of each output: in_channels k^2 for a convolution."""
    return math.prod(weight.shape[1:])


def draw_weights(weight: Tensor, kind: Weights, rate: float, generator: torch.Generator | None) -> Tensor:
    """Weights of one layer, of the shape, dtype and device of `weight`."""
    if kind == "own" or weight.is_meta:
        return weight.detach().clone()
    scale = 1.0 if kind == "binary" else math.sqrt(2 / (fan_in(weight) * (1 - rate)))
    if kind == "kaiming-normal":
        drawn = torch.randn(weight.shape, generator=generator, device="cpu")
    else:
        drawn = 2.0 * torch.randint(0, 2, weight.shape, generator=generator, device="cpu") - 1.0
    return (drawn * scale).to(weight)


def draw_scores(weight: Tensor, scale: float | None, generator: torch.Generator | None) -> Tensor:
    """Scores uniform in [-a, a], a = `scale`, or sqrt(1 / fan-in) if that is None."""
    if weight.is_meta:
        return torch.empty_like(weight)
    limit = math.sqrt(1 / fan_in(weight)) if scale is None else scale
    drawn = torch.rand(weight.shape, generator=generator, device="cpu")
    return ((2 * drawn - 1) * limit).to(weight)


def magnitude_scores(weight: Tensor) -> Tensor:
    """sqrt(6 / fan-in) w / max |w|: the ranking starts as the ranking by magnitude (Sehwag et al., "HYDRA", 2020)."""
    w = weight.detach()
    if w.is_meta:
        return torch.empty_like(w)
    return math.sqrt(6 / fan_in(w)) * w / w.abs().max().clamp(min=torch.finfo(w.dtype).tiny)
