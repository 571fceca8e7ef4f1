"""What an attack has to deal with: does the model draw random numbers, and do its gradients lead anywhere?"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.batches import fitting
from holdfast.attacks.core.chance import Steady, is_stochastic
from holdfast.attacks.core.gradients import answer, frozen, leads_somewhere, look, margin_gradient
from holdfast.attacks.core.indicators import DRAWS, MANY
from holdfast.attacks.core.losses import margin

Worth = Literal["useful", "useless", "none"]
PROBED = 32
"""Inputs to look at."""
STEPS = (0.001, 0.01, 0.1)
"""Lengths of the steps along the gradient, as shares of the valid range: one of them must raise the margin."""


@dataclass(frozen=True)
class Nature:
    """What is known of a model before it is attacked.

    Attributes:
        random: two passes over the same inputs differ.
        gradients: "none" if the answer has none, "useless" if on many inputs they are zero or no step along them raises
            the margin, else "useful".
    """

    random: bool = False
    gradients: Worth = "useful"


@torch.no_grad()
def nature_of(model: nn.Module, x: Tensor, *, low: float = 0.0, high: float = 1.0) -> Nature:
    """Look at a model on some inputs, 32 at most and no more than memory has room for, with the gradients of attacks.

    These gradients see through rounding and a final softmax. torch's generators are left as they were.

    Args:
        x: inputs, shape (B, ...).  low, high: the valid range.
    """
    x = x[:PROBED].detach()
    by_chance = is_stochastic(model, x)
    steady = Steady(model, DRAWS) if by_chance else model
    with torch.enable_grad(), frozen(model):
        x = x[: fitting(steady, x, PROBED)]
        leaf = x.clone().requires_grad_(True)
        logits = answer(steady, leaf)
        y = logits.argmax(1)
        gradient = margin_gradient(logits, y, leaf)
    if gradient is None:
        return Nature(by_chance, "none")
    before, works = margin(logits.detach(), y), leads_somewhere(gradient)
    rises = torch.zeros_like(works)
    for share in STEPS:
        there, _ = look(steady, (x + share * (high - low) * gradient.sign()).clamp(low, high), y, margin)
        rises |= there > before
    return Nature(by_chance, "useful" if float((~(works & rises)).double().mean()) <= MANY else "useless")
