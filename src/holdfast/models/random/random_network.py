"""The one type of networks that draw random numbers: a network with random layers, and what is asked of it."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.checks import check_inputs, check_logits, check_model, modules_in
from holdfast.errors import InputError, UnsupportedError

DRAWS = 20
"""Draws whose mean softmax is the prediction of a random network (Lee's thesis, 2021)."""


class RandomLayer(nn.Module):
    """A layer around another one that draws random numbers at each pass, in training and in eval mode alike."""

    layer: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self._modules.get("layer") if name != "_modules" else None
            if inner is not None and name in inner._parameters:
                raise AttributeError(
                    f"the model reads '{name}' of a layer that is now inside a {type(self).__name__}, which draws at "
                    "each pass; only layers that a model calls can be made random, not weights that it takes from them"
                ) from None
            raise

    @property
    def noisy(self) -> bool:
        """False if the noise has scale zero, so that the layer is the one inside."""
        raise NotImplementedError

    def frozen(self, generator: torch.Generator) -> nn.Module:
        """A deterministic module that stands for one draw; it shares no parameter with this layer."""
        raise NotImplementedError


class RandomNetwork(nn.Module):
    """A network that draws its weights or its activations anew at each pass, (B, ...) -> logits (B, K).

    Draws come from torch's global generators. Weights are drawn once for a batch, activations for each input. What it
    predicts is the class of largest mean softmax over 20 draws; attacks and training judge it by that, an audit by 100.

    Args:
        network: holds at least one `RandomLayer`; `adv_bnn` and `rse` make one of any model.

    Example:
        >>> from holdfast.models import make_model
        >>> model = make_model("adv-bnn", of="mlp", input_shape=(2,), classes=3, seed=0).eval()
        >>> one, x = model.sample(0), torch.rand(4, 2)
        >>> bool((one(x) == one(x)).all()), bool((model(x) == model(x)).all())
        (True, False)
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not any(isinstance(module, RandomLayer) for module in network.modules()):
            raise InputError("a random network needs a random layer; make one with adv_bnn(model) or rse(model)")
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x)
        return logits

    def sample(self, seed: int | None = None) -> nn.Module:
        """One draw as a deterministic module in eval mode, with weights of its own: to attack, certify or transfer.

        Activation noise is drawn once for all inputs, at the first pass.

        Args:
            seed: fixes the draw; None takes the next one of torch's global generator.
        """
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())) if seed is None else seed % 2**63)
        shells, bare = list(_inside(self.network)), self.network
        # The layers inside are copied by the draws themselves; a copy of all weights before would be thrown away.
        memo: dict[int, object] = {id(layer): layer.frozen(generator) for layer in shells}
        return copy.deepcopy(bare, memo).eval()

    @torch.no_grad()
    def predict(self, x: Tensor, *, draws: int = DRAWS, seed: int = 0) -> Tensor:
        """Class of largest mean softmax over `draws` passes, (B,); torch's generators are left as they were."""
        if draws < 1:
            raise InputError(f"a prediction needs at least one draw, got {draws}")
        check_model(self)
        check_inputs(x, -math.inf, math.inf)
        devices = [x.device] if x.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed % 2**63)
            log_p = torch.stack([check_logits(self, x).log_softmax(1) for _ in range(draws)])
        return (log_p.logsumexp(0) - math.log(draws)).argmax(1)


def _inside(network: nn.Module) -> Iterator[RandomLayer]:
    return (module for module in modules_in(network) if isinstance(module, RandomLayer))


def draws_noise(model: nn.Module) -> bool:
    """Whether a model holds a random layer whose noise has not scale zero."""
    return any(layer.noisy for layer in _inside(model))


def check_function(model: nn.Module) -> None:
    """Refuse to prove anything about a random network: it gives more than one answer to an input."""
    for layer in _inside(model):
        if layer.noisy:
            name = next(name for name, module in model.named_modules() if module is layer) or type(layer).__name__
            raise UnsupportedError(
                f"layer '{name}' draws random numbers, and a proof speaks of a function, which "
                "gives one answer to one input. There is no certificate for a network with random weights or "
                "activations; model.sample() is one draw of it, which can be certified, and hf.Smoothed smooths a "
                "network without randomness of its own."
            )
