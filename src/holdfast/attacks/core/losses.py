"""What an attack maximises: functions from logits (B, K) and labels (B,) to one value per input (B,).

All but the cross-entropy are positive exactly where the input is misclassified (targeted ones: where the target beats
the label). `*_targeted` take the target classes (B,) as a third argument.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.errors import InputError, did_you_mean

Loss = Callable[[Tensor, Tensor], Tensor]
TargetedLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _at(logits: Tensor, y: Tensor) -> Tensor:
    return logits.gather(1, y[:, None])[:, 0]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log softmax(z)_y."""
    return torch.nn.functional.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{j != y} z_j - z_y (Carlini and Wagner, "Towards evaluating the robustness of neural networks", 2017)."""
    others = logits.scatter(1, y[:, None], -torch.inf)
    return others.amax(1) - _at(logits, y)


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio: margin / (z_(1) - z_(3)), free of the logits' shift and scale.

    Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks",
    2020. Two classes have no third logit, and get the margin itself.
    """
    top = logits.topk(min(3, logits.shape[1]), dim=1).values
    return _ratio(margin(logits, y), top[:, 0] - top[:, -1] if top.shape[1] == 3 else None)


def targeted_margin(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """z_t - z_y."""
    return _at(logits, target) - _at(logits, y)


def targeted_cross_entropy(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """log softmax(z)_t."""
    return -cross_entropy(logits, target)


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2); with three classes or fewer only the numerator.

    With three, z_(1) - z_(3) would make it -1 wherever the target comes last, and its gradient zero.
    """
    top = logits.topk(min(4, logits.shape[1]), dim=1).values
    spread = top[:, 0] - top[:, 2:].mean(1) if top.shape[1] == 4 else None
    return _ratio(targeted_margin(logits, y, target), spread)


def likely_targets(logits: Tensor, y: Tensor, count: int | None = None) -> Tensor:
    """Classes other than y, the highest logit first, shape (B, min(count, K - 1)); all K - 1 if count is None."""
    others = logits.scatter(1, y[:, None], -torch.inf)
    ranked: Tensor = others.argsort(dim=1, descending=True, stable=True)[:, :-1]
    return ranked[:, :count]


def _ratio(difference: Tensor, spread: Tensor | None) -> Tensor:
    return difference if spread is None else difference / spread.clamp(min=1e-12)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin, "dlr": dlr}
TARGETED: dict[str, TargetedLoss] = {"ce": targeted_cross_entropy, "margin": targeted_margin, "dlr": targeted_dlr}


def get_loss(loss: str | Loss) -> Loss:
    """A loss by name, or the function itself."""
    if callable(loss):
        return loss
    if loss not in LOSSES:
        raise InputError(f"unknown loss '{loss}'. " + did_you_mean(loss, LOSSES))
    return LOSSES[loss]


def get_targeted(loss: str) -> TargetedLoss:
    """A targeted loss by name."""
    if loss not in TARGETED:
        raise InputError(f"unknown targeted loss '{loss}'. " + did_you_mean(loss, TARGETED))
    return TARGETED[loss]
