"""Directions in the space of weights: filter-normalised random ones, and moves along them."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters


def filter_direction(model: nn.Module, seed: int) -> Tensor:
    """A random direction (P,) in which every filter has the norm of the filter of the model (Li et al., "Visualizing
    the loss landscape of neural nets", 2018).

    A filter is what belongs to one output of a layer: the first axis of a weight. Biases and the parameters of
    normalisation, which have one axis, stay.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for p in model.parameters():
        if p.ndim < 2:
            parts.append(torch.zeros(p.numel(), dtype=p.dtype))
            continue
        d = torch.randn(p.shape, generator=generator, dtype=torch.float64).flatten(1)
        size = p.detach().cpu().double().flatten(1).norm(dim=1, keepdim=True)
        parts.append((d * size / d.norm(dim=1, keepdim=True).clamp(min=1e-300)).flatten().to(p.dtype))
    return torch.cat(parts).to(next(model.parameters()).device)


def random_direction(model: nn.Module, seed: int) -> Tensor:
    """A random unit vector (P,)."""
    like = next(model.parameters())
    count = sum(p.numel() for p in model.parameters())
    v = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit: Tensor = v / v.norm()
    return unit.to(like)


def moved(model: nn.Module, step: Tensor) -> nn.Module:
    """A copy of the model in eval mode with `step` (P,) added to its weights."""
    net = copy.deepcopy(model).eval()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    vector_to_parameters(flat + step.to(flat), net.parameters())
    return net.requires_grad_(False)
