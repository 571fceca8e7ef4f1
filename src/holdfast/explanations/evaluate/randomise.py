"""Does an explanation depend on what the model has learnt? It must fall apart when the weights are destroyed.

Adebayo et al., "Sanity checks for saliency maps", 2018.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.explanations import explain
from holdfast.random import Noise
from holdfast.utils.show import Shown


@dataclass(frozen=True, eq=False, repr=False)
class Randomised(Shown):
    """How alike an explanation stays while the layers lose their weights, from the last one down.

    Attributes:
        layers: names of the layers randomised at each stage; none at stage 0.
        correlation: (stages, B) Spearman's rank correlation of the absolute values with the intact model's.
        compared: (B,) share of the values that were compared; the others are zero at every stage.
    """

    layers: tuple[tuple[str, ...], ...]
    correlation: Tensor
    compared: Tensor


def randomised(
    model: nn.Module, x: Tensor, y: Tensor, method: str = "big", *, at_once: int = 1, seed: int = 0, **options: Any
) -> Randomised:
    """Explain the same inputs by ever more random models; the model itself is not changed.

    Weights become normal random numbers with the norm that the tensor had, so that activations keep their size. Methods
    that look for a boundary look for the boundary of the randomised model. An explanation that passes ends near
    correlation 0.

    Values whose attribution is exactly zero at every stage are not compared. They are zero whatever the weights are:
    a method that multiplies by x - b gives nothing to the pixels that equal the baseline b. On digits those are most
    pixels, all tied at the lowest rank: they held the correlation of two unrelated models above 0.9. What is
    left still holds the factor x - b, which no weights change; such methods may end well above 0.

    Args:
        method: a method of `hf.explain`; `options` go to it.
        at_once: layers randomised at each stage.
    """
    if at_once < 1:
        raise InputError(f"at_once must be at least 1, got {at_once}")
    network = copy.deepcopy(model)
    layers = [name for name, module in network.named_modules() if list(module.parameters(recurse=False))][::-1]
    if not layers:
        raise InputError("the model has no parameters to randomise")
    stages: list[tuple[str, ...]] = [()]
    sizes = [explain(network, x, y, method, seed=seed, **options).attribution.abs()]
    modules = dict(network.named_modules())
    for start in range(0, len(layers), at_once):
        stages.append(tuple(layers[start : start + at_once]))
        for offset, name in enumerate(stages[-1], start):
            _destroy(modules[name], Noise.for_batch(seed, 1).fork(offset))
        sizes.append(explain(network, x, y, method, seed=seed, **options).attribution.abs())
    free = torch.stack(sizes).ne(0).any(0)
    correlation = torch.stack([rank_correlation(sizes[0], size, among=free) for size in sizes])
    return Randomised(tuple(stages), correlation, free.flatten(1).double().mean(1))


def randomise_all(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model itself, with all of its weights destroyed in place: what no training gives."""
    for offset, module in enumerate(model.modules()):
        _destroy(module, Noise.for_batch(seed, 1).fork(offset))
    return model


@torch.no_grad()
def _destroy(module: nn.Module, noise: Noise) -> None:
    for i, parameter in enumerate(module.parameters(recurse=False)):
        random = noise.fork(i).normal(parameter.shape, torch.float64)[0].to(parameter)
        parameter.copy_(random * parameter.norm() / random.norm().clamp(min=1e-30))


def rank_correlation(a: Tensor, b: Tensor, *, among: Tensor | None = None) -> Tensor:
    """Spearman's correlation of each input, (B, ...) and (B, ...) -> (B,); 0 where all values of one are equal.

    Equal values share their mean rank.

    Args:
        a, b: (B, ...) each.
        among: (B, ...) bool, the values that count; all if it is not given.
    """
    kept = (torch.ones_like(a, dtype=torch.bool) if among is None else among).flatten(1)
    # Values that do not count come last, and so change no rank of the others.
    ranks = [_ranks(t.flatten(1).double().masked_fill(~kept, torch.inf)) for t in (a, b)]
    count = kept.sum(1, keepdim=True).clamp(min=1)
    centred = [(r - (r * kept).sum(1, keepdim=True) / count) * kept for r in ranks]
    size = (centred[0].square().sum(1) * centred[1].square().sum(1)).sqrt()
    return (centred[0] * centred[1]).sum(1) / size.clamp(min=1e-30)


def _ranks(values: Tensor) -> Tensor:
    """Rank of each value in its row, (B, n): values below, plus half of the values equal to it."""
    ordered = values.sort(1).values.contiguous()
    values = values.contiguous()
    below, at_most = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (below + at_most).double() / 2
