"""Noise on the inputs of convolutions, also at test time: random self-ensemble (RSE).

(Liu et al., "Towards robust neural networks via random self-ensemble", 2018.)
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.models.catalog import Normalization
from holdfast.models.catalog import add_architecture as add
from holdfast.models.random.random_network import RandomLayer, RandomNetwork
from holdfast.models.random.wrap import CONVOLUTIONS, DENSE, check_inner, make_inner, recorded, wrap_layers
from holdfast.utils.options import NotNegative, check_options, options_of

_NAME = "rse"


class NoisyInput(RandomLayer):
    """layer(x + std g), g standard normal, drawn for each value of each input; the layer itself where std is 0."""

    def __init__(self, layer: nn.Module, std: float) -> None:
        super().__init__()
        self.layer, self.std = layer, std

    def extra_repr(self) -> str:
        return f"std={self.std:g}"

    @property
    def noisy(self) -> bool:
        return self.std > 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x + self.std * torch.randn_like(x) if self.noisy else x)
        return output

    def frozen(self, generator: torch.Generator) -> nn.Module:
        layer = copy.deepcopy(self.layer)
        seed = int(torch.randint(2**62, (), generator=generator))
        return FixedShift(layer, self.std, seed) if self.noisy else layer


class FixedShift(nn.Module):
    """layer(x + std g) with one g for all inputs and passes, which the seed fixes; drawn at the first pass."""

    shift: Tensor | None
    seed: Tensor

    def __init__(self, layer: nn.Module, std: float, seed: int) -> None:
        super().__init__()
        self.layer, self.std = layer, std
        self.register_buffer("seed", torch.tensor(seed))  # part of the state, so that two draws do not look the same
        self.register_buffer("shift", None, persistent=False)

    def extra_repr(self) -> str:
        return f"std={self.std:g}"

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is None:
            generator = torch.Generator().manual_seed(int(self.seed))
            self.shift = (self.std * torch.randn(x.shape[1:], generator=generator)).to(x)
        output: Tensor = self.layer(x + self.shift)
        return output


def rse(model: nn.Module, *, first: NotNegative = 0.2, others: NotNegative = 0.1) -> RandomNetwork:
    """Add Gaussian noise to what each convolution of a copy of `model` is given, in training and at test time.

    A model without convolutions gets the noise in front of its dense layers, which the paper does not have.

    Args:
        model: any module whose layers are called in the order in which they are registered.
        first: standard deviation before the first one, in the units of what it is given: after a normalisation these
            are not pixels.
        others: standard deviation before all others.
    """
    check_inner(model)
    own = check_options(options_of(rse), {"first": first, "others": others}, f"architecture '{_NAME}'")
    kinds = CONVOLUTIONS if any(isinstance(module, CONVOLUTIONS) for module in model.modules()) else DENSE

    def change(layer: nn.Module, number: int) -> nn.Module:
        return NoisyInput(layer, others if number else first)

    return recorded(RandomNetwork(wrap_layers(model, kinds, change)), model, _NAME, own)


def rse_of(
    *,
    of: str = "graddiv-mnist",
    first: NotNegative = 0.2,
    others: NotNegative = 0.1,
    normalize: Normalization | None = None,
    **options: Any,
) -> RandomNetwork:
    """`rse` of a new model of the architecture `of`, with its options."""
    return rse(make_inner(of, normalize=normalize, **options), first=first, others=others)


add(
    *(_NAME, rse_of, "another architecture with noise before each convolution, also at test time; choose of"),
    "Liu et al., Towards robust neural networks via random self-ensemble, 2018",
    composite=True,
)
