"""The adversary whose loss is looked at: projected gradient ascent from a random start."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.ascent import BALLS, perturb
from holdfast.errors import UnsupportedError
from holdfast.random import Noise
from holdfast.threats import Threat
from holdfast.utils.options import Count, Whole, check_fields


@dataclass(frozen=True)
class Adversary:
    """How inputs are perturbed; every choice follows from `seed`, so that two weights meet the same adversary.

    Attributes:
        threat: what may change; a budget of 0 leaves inputs as they are.
        steps: of the ascent, each of 2.5 * budget / steps.
        seed: of the random starts.
        chunk: inputs worked on at a time; the answer does not change.
    """

    threat: Threat
    steps: Count = 10
    seed: Whole = 0
    chunk: Count = 500

    def __post_init__(self) -> None:
        check_fields(self)
        if self.threat.name not in BALLS:
            raise UnsupportedError(f"a landscape needs a threat among {', '.join(BALLS)}, got '{self.threat}'")

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Perturbed inputs, shape of x; the loss is the cross-entropy."""
        if self.threat.budget == 0:
            return x
        size, found = 2.5 * self.threat.budget / self.steps, []
        for rows in torch.arange(len(x), device=x.device).split(self.chunk):
            noise = Noise(self.seed, rows)
            threat = self.threat.select(rows)
            found.append(perturb(model, x[rows], y[rows], threat, noise=noise, steps=self.steps, step_size=size))
        return torch.cat(found)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> float:
        """The mean cross-entropy of the model, attacked anew."""
        return mean_loss(model, self.perturb(model, x, y), y, self.chunk)


@torch.no_grad()
def mean_loss(model: nn.Module, x: Tensor, y: Tensor, chunk: int = 500) -> float:
    """Mean cross-entropy over inputs (N, ...), in float64."""
    parts = zip(x.split(chunk), y.split(chunk), strict=True)
    return sum(float(cross_entropy(model(a).double(), b, reduction="sum")) for a, b in parts) / len(x)
