"""What the attacks know of the inside of a network: its last layer, its weight matrices, the order of its units."""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from holdfast.errors import InputError, UnsupportedError
from holdfast.models import Normalize

# Layers that treat all channels alike, so that a permutation passes through them.
_ALIKE = (
    *(nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.GELU, nn.Dropout, nn.Identity, nn.Flatten),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
)


def last_layer(model: nn.Module) -> nn.Linear:
    """The dense layer that comes last in the order of definition: the head of every usual classifier."""
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise UnsupportedError("the model has no dense layer (torch.nn.Linear), so that its last layer is not known")
    return found[-1]


def matrices(model: nn.Module) -> list[Tensor]:
    """The weights of dense layers and convolutions; biases and batch norm are left out."""
    found: list[Tensor] = [p for p in model.parameters() if p.ndim >= 2]
    if not found:
        raise InputError("the model has no dense layer and no convolution to change")
    return found


@torch.no_grad()
def shuffle_chain(model: nn.Module, seed: int) -> nn.Module:
    """Permutes the hidden units of a chain of layers in place; what the model computes stays, up to rounding.

    Args:
        model: nn.Sequential, nested or not, of dense layers, convolutions, batch norm, pooling, elementwise functions.
    """
    chain = _chain(model)
    generator = torch.Generator().manual_seed(seed)
    weighted = [i for i, layer in enumerate(chain) if isinstance(layer, nn.Linear | _ConvNd)]
    if len(weighted) < 2:
        raise UnsupportedError("the model has no hidden layer: there are no units to shuffle")
    for first, second in pairwise(weighted):
        layer = cast(nn.Linear, chain[first])
        units = len(layer.weight)
        order = torch.randperm(units, generator=generator).to(layer.weight.device)
        _reorder(layer, order)
        for between in chain[first + 1 : second]:
            if isinstance(between, _BatchNorm):
                _reorder(between, order)
        reader = cast(nn.Linear, chain[second]).weight
        # After Flatten each channel stands for a block of neighbouring inputs.
        blocks = reader.unflatten(1, (units, -1))
        reader.copy_(blocks[:, order].flatten(1, 2))
    return model


def _chain(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.Sequential):
        return [leaf for child in model for leaf in _chain(child)]
    if isinstance(model, _ConvNd) and model.groups != 1:
        raise UnsupportedError("feature shuffling has no rule for convolutions in groups")
    if isinstance(model, (nn.Linear, _ConvNd, _BatchNorm, Normalize, *_ALIKE)):
        return [model]
    raise UnsupportedError(
        f"feature shuffling has no rule for {type(model).__name__}: it needs a chain (torch.nn.Sequential) of dense "
        "layers, convolutions, batch norm, pooling and elementwise activations"
    )


def _reorder(layer: nn.Module, order: Tensor) -> None:
    """Permutes the outputs: the first axis of weight, bias and statistics."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = getattr(layer, name, None)
        if value is not None:
            value.copy_(value[order])
