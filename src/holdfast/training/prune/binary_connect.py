"""BinaryConnect: compute with the signs of the weights, and train the real weights behind them."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.models.masked import Sign, computed
from holdfast.models.masked import binary_connect as with_signs
from holdfast.registry import Part


@Part(
    "binary-connect",
    part="prune",
    summary="weights of -1 and 1: the signs of real weights that are trained and stay in [-1, 1]",
    reference="Courbariaux, Bengio and David, BinaryConnect: training deep networks with binary weights, 2015",
)
def binary_connect(model: nn.Module, seed: int, *, last_batch_norm: bool = False) -> nn.Module:
    """The model with signs for weights; its real weights begin as they are."""
    return with_signs(model, last_batch_norm=last_batch_norm)


def clip_real_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """Clip the real weights behind signs to [-1, 1] after every step: beyond, steps would have no effect for long."""
    layers = [model.get_submodule(name) for name in computed(model, Sign)]
    weights: list[Any] = [layer.parametrizations.weight.original for layer in layers]  # type: ignore[union-attr]

    def clip(*_: Any) -> None:
        with torch.no_grad():
            for weight in weights:
                weight.clamp_(-1, 1)

    if weights:
        optimizer.register_step_post_hook(clip)
