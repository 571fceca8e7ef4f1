"""What an attack maximises: functions from logits (B, K) and labels (B,) to one value per input (B,)."""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.errors import InputError, did_you_mean

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log softmax(z)_y."""
    return torch.nn.functional.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{j != y} z_j - z_y; positive exactly where the input is misclassified (Carlini and Wagner, 2017)."""
    others = logits.scatter(1, y[:, None], -torch.inf)
    return others.amax(1) - logits.gather(1, y[:, None])[:, 0]


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin}


def get_loss(loss: str | Loss) -> Loss:
    """A loss by name, or the function itself."""
    if callable(loss):
        return loss
    if loss not in LOSSES:
        raise InputError(f"unknown loss '{loss}'. " + did_you_mean(loss, LOSSES))
    return LOSSES[loss]
