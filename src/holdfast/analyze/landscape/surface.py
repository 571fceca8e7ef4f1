"""The loss under attack along directions in the space of weights, and how the adversary's answer turns there."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.analyze.landscape.attacked import Adversary
from holdfast.analyze.landscape.weight_directions import moved
from holdfast.errors import InputError


def surface(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    adversary: Adversary,
    directions: Tensor,
    places: Sequence[Sequence[float]],
) -> Tensor:
    """Losses at theta + sum_i a_i v_i with the attack renewed at each place, (len(places),) float64.

    Args:
        directions: (D, P), such as eigenvectors of `spectrum`.
        places: coefficients a, D numbers each.
    """
    count = sum(p.numel() for p in model.parameters())
    if directions.ndim != 2 or directions.shape[1] != count:
        raise InputError(f"directions must have the shape (D, {count}), got {tuple(directions.shape)}")
    losses = []
    for place in places:
        step = torch.tensor(place, dtype=directions.dtype, device=directions.device) @ directions
        losses.append(adversary.loss(moved(model, step), x, y))
    return torch.tensor(losses, dtype=torch.float64)


def perturbation_similarity(
    model: nn.Module, x: Tensor, y: Tensor, adversary: Adversary, direction: Tensor, sizes: Sequence[float]
) -> Tensor:
    """Mean cosine between the perturbations for theta + a v and theta - a v, for each size a, (len(sizes),) float64.

    Both sides share their random starts: at a = 0 the cosine is 1. Inputs that neither adversary moves are left out.
    """
    found = []
    for a in sizes:
        both = [adversary.perturb(moved(model, side * a * direction), x, y) - x for side in (1, -1)]
        one, two = (d.flatten(1).double() for d in both)
        size = one.norm(dim=1) * two.norm(dim=1)
        some = size > 0
        if not bool(some.any()):
            raise InputError("the adversary moves no input: is the budget 0, or the gradient?")
        found.append(((one * two).sum(1)[some] / size[some]).mean())
    return torch.stack(found)
