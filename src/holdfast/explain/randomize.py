"""Does an explanation depend on what the model has learnt? It must fall apart when the weights are destroyed.

Adebayo et al., "Sanity checks for saliency maps", 2018.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.explain import explain
from holdfast.random import Noise


@dataclass(frozen=True, eq=False)
class Randomised:
    """How alike an explanation stays while the layers lose their weights, from the last one down.

    Attributes:
        layers: names of the layers randomised at each stage; none at stage 0.
        correlation: (stages, B) Spearman's rank correlation of the absolute values with those of the intact model.
    """

    layers: tuple[tuple[str, ...], ...]
    correlation: Tensor


def randomised(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    method: str = "big",
    *,
    at_once: int = 1,
    seed: int = 0,
    **options: Any,
) -> Randomised:
    """Explains the same inputs by ever more random models; the model itself is not changed.

    Weights become normal random numbers with the norm that the tensor had, so that activations keep their size. Methods
    that look for a boundary look for that of the randomised model. An explanation that passes ends near correlation 0.

    Args:
        x: inputs, (B, ...).  y: classes, (B,).
        method: of `hf.explain`, with its `options`.
        at_once: layers randomised at each stage.
    """
    if at_once < 1:
        raise InputError(f"at_once must be at least 1, got {at_once}")
    network = copy.deepcopy(model)
    layers = [name for name, module in network.named_modules() if list(module.parameters(recurse=False))][::-1]
    if not layers:
        raise InputError("the model has no parameters to randomise")
    first = explain(network, x, y, method, seed=seed, **options).attribution
    stages: list[tuple[str, ...]] = [()]
    correlation = [rank_correlation(first.abs(), first.abs())]
    modules = dict(network.named_modules())
    for start in range(0, len(layers), at_once):
        stages.append(tuple(layers[start : start + at_once]))
        for offset, name in enumerate(stages[-1], start):
            _destroy(modules[name], Noise.for_batch(seed, 1).fork(offset))
        now = explain(network, x, y, method, seed=seed, **options).attribution
        correlation.append(rank_correlation(first.abs(), now.abs()))
    return Randomised(tuple(stages), torch.stack(correlation))


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


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation of each input, (B, ...) and (B, ...) -> (B,); 0 where all values of one are equal.

    Equal values share their mean rank.
    """
    ranks = [_ranks(t.flatten(1).double()) for t in (a, b)]
    centred = [r - r.mean(1, keepdim=True) for r in ranks]
    size = (centred[0].square().sum(1) * centred[1].square().sum(1)).sqrt()
    return (centred[0] * centred[1]).sum(1) / size.clamp(min=1e-30)


def _ranks(values: Tensor) -> Tensor:
    """Rank of each value in its row, (B, n): values below, plus half of the values equal to it."""
    ordered = values.sort(1).values.contiguous()
    values = values.contiguous()
    below, at_most = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (below + at_most).double() / 2
