"""Weights that a network computes before it uses them: a mask over fixed weights, and signs of real ones.

Both are parametrisations of `torch.nn.utils.parametrize`: the layer stays an `nn.Linear` or `nn.Conv2d` whose `weight`
is computed, so that attacks, bounds and certificates see the network as it is.
"""

from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from holdfast.errors import UnsupportedError

Transform = Literal["abs", "identity"]
K = TypeVar("K", bound=nn.Module)


def top(values: Tensor, kept: int) -> Tensor:
    """True at the `kept` largest values, exactly so many: of equal values the first ones.

    >>> top(torch.tensor([[1.0, 3.0], [1.0, 1.0]]), 2)
    tensor([[ True,  True],
            [False, False]])
    """
    flat = values.detach().flatten()
    threshold = flat.kthvalue(len(flat) - kept + 1).values
    chosen = flat > threshold
    equal = (flat == threshold).nonzero()[:, 0]
    chosen[equal[: kept - int(chosen.sum())]] = True
    return chosen.view_as(values)


class Mask(nn.Module):
    """theta * m, where m is 1 at the `kept` weights with the largest |score| (or score) and 0 elsewhere.

    The gradient goes straight through: dm/ds = I, so every score gets theta * dL/d(theta m), those of pruned weights
    too, times sign(s) for the transform "abs".

    Args:
        scores: of the shape of the weights.
        kept: number of weights to keep, at least one.
        transform: what ranks the weights: "abs" for |s|, "identity" for s.
    """

    def __init__(self, scores: Tensor, kept: int, transform: Transform = "abs") -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)
        self.kept, self.transform = kept, transform
        self._last: tuple[Any, ...] = ()

    def ranks(self) -> Tensor:
        """What ranks the weights."""
        return self.scores.abs() if self.transform == "abs" else self.scores

    def pattern(self) -> Tensor:
        """True where a weight is kept. The last answer is used again as long as the scores are the same."""
        scores = self.scores
        if scores.is_inference() or not isinstance(scores, nn.Parameter):
            return top(self.ranks(), self.kept)
        # In-place changes raise the version; a move to another device or dtype makes another tensor.
        key = (scores._version, scores.data_ptr(), scores.device, scores.dtype)
        if not self._last or self._last[0] is not scores or self._last[1] != key:
            self._last = (scores, key, top(self.ranks(), self.kept))
        pattern: Tensor = self._last[2]
        return pattern

    def forward(self, theta: Tensor) -> Tensor:
        if self.scores.is_meta:  # a model without values, only shapes
            return theta
        weight = torch.where(self.pattern(), theta, torch.zeros_like(theta))
        if not self.scores.requires_grad or not torch.is_grad_enabled():
            return weight
        ranks = self.ranks()
        return weight + theta.detach() * (ranks - ranks.detach())


class Sign(nn.Module):
    """sign(w) with sign(0) = 1; the gradient goes straight through to w (BinaryConnect)."""

    def forward(self, w: Tensor) -> Tensor:
        signs = torch.where(w < 0, -1.0, 1.0).to(w.dtype)
        return signs + (w - w.detach()) if torch.is_grad_enabled() else signs


def is_maskable(module: nn.Module) -> bool:
    """Whether it is a dense or a convolution layer."""
    return isinstance(module, nn.Linear | _ConvNd)


def maskable(model: nn.Module) -> dict[str, nn.Module]:
    """The dense and convolution layers by name; an error if there is none, or one computes its weight already."""
    found = {name: module for name, module in model.named_modules() if is_maskable(module)}
    if not found:
        raise UnsupportedError(
            f"the model {type(model).__name__} has no layer that can be masked: it needs nn.Linear or convolutions"
        )
    for name, module in found.items():
        if parametrize.is_parametrized(module, "weight"):
            raise UnsupportedError(f"layer '{name}' computes its weight already; give the model without masks or norms")
    weights = [module.weight for module in found.values()]
    if len({id(weight) for weight in weights}) < len(weights):
        raise UnsupportedError("two layers of the model share a weight, and cannot have a mask each; give each its own")
    return found


def computed(model: nn.Module, kind: type[K]) -> dict[str, K]:
    """The `Mask` or `Sign` of each layer that has one, by the name of the layer."""
    found = {}
    for name, module in model.named_modules():
        if is_maskable(module) and parametrize.is_parametrized(module, "weight"):
            first = module.parametrizations.weight[0]
            if isinstance(first, kind):
                found[name] = first
    return found


def fixed_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights theta under the mask of each layer, by name."""
    return {name: _theta(model.get_submodule(name)) for name in computed(model, Mask)}


def patterns(model: nn.Module) -> dict[str, Tensor]:
    """Which weights each dense or convolution layer keeps, by name: its mask, or the weights that are not 0."""
    masks = computed(model, Mask)
    layers = {name: module for name, module in model.named_modules() if is_maskable(module)}
    return {
        name: masks[name].pattern() if name in masks else module.weight.detach() != 0 for name, module in layers.items()
    }


def _theta(module: nn.Module) -> Tensor:
    theta: Tensor = module.parametrizations.weight.original  # type: ignore[union-attr,assignment]
    return theta
