"""Weights with a Gaussian distribution of their own each: the Bayesian layers of Adv-BNN.

theta = mu + exp(s) g, g standard normal, with mu and s learned. The Kullback-Leibler divergence to the prior
N(0, sigma_0^2) is, for each weight, log sigma_0 - s + (exp(2 s) + mu^2) / (2 sigma_0^2) - 1/2. (Liu et al., "Adv-BNN:
improved adversarial defense through robust Bayesian neural network", 2019.)
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holdfast.models.catalog import Normalization
from holdfast.models.catalog import add_architecture as add
from holdfast.models.random.random_network import RandomLayer, RandomNetwork
from holdfast.models.random.wrap import AFFINE, NORMS, check_inner, make_inner, recorded, wrap_layers
from holdfast.utils.options import NotNegative, Positive, check_options, options_of

_NAME = "adv-bnn"


class GaussianLayer(RandomLayer):
    """A layer whose parameters are drawn at each pass, one draw for the whole batch.

    Args:
        layer: its parameters are the means mu.
        prior_std: sigma_0.
        posterior_std: exp(s) before training; sigma_0 if none is given. With 0 the layer is the one inside.
    """

    def __init__(self, layer: nn.Module, prior_std: float, posterior_std: float | None = None) -> None:
        super().__init__()
        std = prior_std if posterior_std is None else posterior_std
        s = math.log(std) if std > 0 else -math.inf
        own = dict(layer.named_parameters(recurse=False))
        self.layer, self.prior_std = layer, prior_std
        self.log_std = nn.ParameterDict({name: nn.Parameter(torch.full_like(mu, s)) for name, mu in own.items()})

    def extra_repr(self) -> str:
        return f"prior_std={self.prior_std:g}"

    @property
    def noisy(self) -> bool:
        # The tensors themselves: inside torch.fx, attributes are symbols. Without values there may be noise.
        scales = [s for s in self.log_std._parameters.values() if s is not None]
        return any(s.is_meta or bool((s > -torch.inf).any()) for s in scales)

    def _weights(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        drawn = {}
        for name, s in self.log_std.items():
            mu = getattr(self.layer, name)
            # A generator of its own is one of the CPU, so that a seed means the same everywhere.
            normal = torch.randn_like(mu) if generator is None else torch.randn(mu.shape, generator=generator).to(mu)
            drawn[name] = mu + s.exp() * normal
        return drawn

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = functional_call(self.layer, self._weights(), (x,)) if self.noisy else self.layer(x)
        return output

    @torch.no_grad()
    def frozen(self, generator: torch.Generator) -> nn.Module:
        layer = copy.deepcopy(self.layer)
        for name, value in self._weights(generator).items():
            getattr(layer, name).copy_(value)
        return layer

    def divergence(self) -> Tensor:
        """KL from the prior, summed over the weights, a scalar."""
        terms = [
            math.log(self.prior_std) - s + ((2 * s).exp() + mu.square()) / (2 * self.prior_std**2) - 0.5
            for s, mu in ((s, getattr(self.layer, name)) for name, s in self.log_std.items())
        ]
        return torch.stack([term.sum() for term in terms]).sum()


def gaussian_divergence(model: nn.Module) -> Tensor | None:
    """Sum over the Gaussian layers of KL(posterior || prior), a scalar; None if there is no such layer."""
    found = [layer.divergence() for layer in model.modules() if isinstance(layer, GaussianLayer)]
    return torch.stack(found).sum() if found else None


def adv_bnn(
    model: nn.Module,
    *,
    prior_std: Positive = 0.05,
    posterior_std: NotNegative | None = None,
    random_norm: bool = False,
) -> RandomNetwork:
    """Give every dense and convolutional layer of a copy of `model` Gaussian weights around its own.

    Args:
        model: any module.
        prior_std: sigma_0; published 0.05 for MNIST, 0.1 for CIFAR-10 and 0.15 for STL-10.
        posterior_std: standard deviation of every weight before training; sigma_0 if none is given. 0: no noise.
        random_norm: also randomise the scale and the shift of batch norm, as the authors' code does.
    """
    check_inner(model)
    own = {"prior_std": prior_std, "posterior_std": posterior_std, "random_norm": random_norm}
    own = check_options(options_of(adv_bnn), own, f"architecture '{_NAME}'")
    kinds = (*AFFINE, *NORMS) if random_norm else AFFINE

    def change(layer: nn.Module, number: int) -> nn.Module:
        return GaussianLayer(layer, prior_std, posterior_std)

    return recorded(RandomNetwork(wrap_layers(model, kinds, change)), model, _NAME, own)


def adv_bnn_of(
    *,
    of: str = "graddiv-mnist",
    prior_std: Positive = 0.05,
    posterior_std: NotNegative | None = None,
    random_norm: bool = False,
    normalize: Normalization | None = None,
    **options: Any,
) -> RandomNetwork:
    """`adv_bnn` of a new model of the architecture `of`, with its options."""
    inner = make_inner(of, normalize=normalize, **options)
    return adv_bnn(inner, prior_std=prior_std, posterior_std=posterior_std, random_norm=random_norm)


add(
    *(_NAME, adv_bnn_of, "another architecture with Gaussian weights, drawn at each pass; choose of and prior_std"),
    "Liu et al., Adv-BNN: improved adversarial defense through robust Bayesian neural network, 2019",
    composite=True,
)
