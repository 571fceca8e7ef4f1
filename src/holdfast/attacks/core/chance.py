"""Models that draw random numbers: how to tell, how to fix their draws, and what they predict on average.

A random model draws from torch's global generators. It is judged by its mean softmax over several draws.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import logits_of
from holdfast.attacks.fast.lean import Lean
from holdfast.checks import modules_in
from holdfast.errors import InputError
from holdfast.models.random.random_network import draws_noise


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's global generators from `seed` inside, and put them back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed % 2**63)
        yield


@torch.no_grad()
def mean_prediction(model: nn.Module, x: Tensor, samples: int = 20, seed: int = 0) -> Tensor:
    """Log of the mean softmax over `samples` passes, (B, K): what a model that draws random numbers predicts."""
    with seeded(seed, x.device):
        return log_mean_softmax(model, x, samples)


class Steady(nn.Module):
    """Make a random model a function: the log of its mean softmax over a few draws that are always the same.

    An attack may fit these draws, so that other draws must confirm what it finds (`mean_prediction`). A batch of
    another size or order gets other draws if the model draws for each input.

    Args:
        draws: passes in each call.  seed: fixes their random numbers.
    """

    def __init__(self, model: nn.Module, draws: int, seed: int = 0) -> None:
        super().__init__()
        self.model, self.draws, self.seed = model, draws, seed
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K)."""
        with seeded(self.seed, x.device):
            return log_mean_softmax(self.model, x, self.draws)


def log_mean_softmax(model: nn.Module, x: Tensor, samples: int) -> Tensor:
    """Log of the mean softmax over `samples` passes, (B, K), with the draws that come next."""
    total: Tensor | None = None
    for _ in range(samples):
        log_p = logits_of(model, x).log_softmax(1)
        total = log_p if total is None else torch.logaddexp(total, log_p)
    if total is None:
        raise InputError(f"a mean prediction needs at least one sample, got {samples}")
    return total - math.log(samples)


def _generators(device: torch.device) -> list[Tensor]:
    """States of the generators that a model on this device draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


PROBED = 8
"""Inputs that a model sees a second time if it does not draw from torch's generators."""


def watched(model: nn.Module, x: Tensor, seed: int, look: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """The logits (B, K) of x that `look` gives, and whether the model draws random numbers.

    A pass that leaves torch's generators alone is repeated on a few inputs only: the model may have generators of its
    own, or its answers may depend on the rest of the batch.
    """
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")  # `look` refuses what is no tensor
    with seeded(seed, device):  # what the model draws is put back
        before = _generators(device)
        logits = look()
        drawn = any(not torch.equal(a, b) for a, b in zip(before, _generators(device), strict=True))
    if drawn:
        return logits, is_stochastic(model, x)
    with torch.no_grad():
        return logits, _differ(logits[:PROBED], model(x[:PROBED].detach().clone()))


@torch.no_grad()
def is_stochastic(model: nn.Module, x: Tensor) -> bool:
    """True if the model holds a random layer, or two passes over some inputs (32 at most) differ by more than rounding.

    If the passes draw from torch's generators and their answers still agree (noise seldom changes a decision), the
    values inside the model are compared as well.
    """
    if isinstance(model, Lean):  # made only of models that were looked at
        return False
    if draws_noise(model):
        return True
    x = x[:32]
    with seeded(0, x.device):
        before = _generators(x.device)
        first, second = model(x), model(x)
        drawn = any(not torch.equal(a, b) for a, b in zip(before, _generators(x.device), strict=True))
        if _differ(first, second) or not drawn:
            return _differ(first, second)
        pairs = zip(*(_values_inside(model, x) for _ in range(2)), strict=False)
        return any(a.shape == b.shape and _differ(a, b) for a, b in pairs)


def _differ(first: Tensor, second: Tensor) -> bool:
    rounding = 1e3 * torch.finfo(first.dtype).eps * float(first.abs().amax())
    return bool(((first - second).abs() > rounding).any())


def _values_inside(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What the modules of the model return, call by call, where it is one tensor of floats."""
    values: list[Tensor] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            values.append(output.clone())

    handles = [module.register_forward_hook(note) for module in modules_in(model)]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return values
