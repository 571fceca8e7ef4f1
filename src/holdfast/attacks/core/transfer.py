"""Transferability: how well the examples crafted on one model fool another."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import perturb
from holdfast.attacks.core.chance import watched
from holdfast.checks import check_task
from holdfast.errors import InputError, did_you_mean
from holdfast.random import Noise
from holdfast.registry import get
from holdfast.threats import Threat

_PERTURB = ("steps", "step_size", "loss", "random_start", "sparsity")


@dataclass(frozen=True)
class TransferSummary:
    """Accuracy over all pairs of a source and another target: the lower, the better examples transfer."""

    mean: float
    min: float
    max: float


def transfer_matrix(
    models: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    method: str = "pgd",
    *,
    seed: int = 0,
    chunk: int = 256,
    **options: Any,
) -> Tensor:
    """Entry (i, j) is the accuracy of model j on the examples crafted on model i, shape (n, n).

    The diagonal is the accuracy under the attack itself. Draws of a random model are given as frozen models.

    Args:
        models: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: what the adversary may do.
        method: "pgd" takes all steps for every input: 20 of a quarter of the budget from x, if the options do not say
            otherwise. Other attacks stop at their first example, near the source's boundary, which transfers less.
        seed: fixes every random choice; the same for all sources.
        chunk: inputs worked on at a time; the answer does not change.
        **options: options of the method, such as steps=.
    """
    if len(models) == 0:
        raise InputError("a transfer matrix needs at least one model, got none")
    for number, model in enumerate(models):
        if watched(model, x, seed, partial(check_task, model, x, y, threat))[1]:
            raise InputError(
                f"model {number} draws random numbers; give frozen draws of it, such as model.sample(0) and "
                "model.sample(1)"
            )
    sources = [_craft(model, x, y, threat, method, seed, chunk, options) for model in models]
    return torch.stack([torch.stack([_accuracy(model, x_adv, y, chunk) for model in models]) for x_adv in sources])


def transfer_summary(matrix: Tensor) -> TransferSummary:
    """Mean, least and largest entry off the diagonal of a transfer matrix (n, n), n >= 2."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise InputError(f"a transfer matrix of two models or more is needed, got shape {tuple(matrix.shape)}")
    others = matrix[~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)]
    return TransferSummary(float(others.mean()), float(others.min()), float(others.max()))


def _craft(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, method: str, seed: int, chunk: int, options: dict[str, Any]
) -> Tensor:
    from holdfast.attacks import attack  # it imports the modules of this package

    if method != "pgd":
        return attack(model, x, y, threat, method, seed=seed, chunk=chunk, **options).x_adv
    get("attack", "pgd").check(threat, {})
    unknown = [option for option in options if option not in _PERTURB]
    if unknown:
        raise InputError(f"transfer by 'pgd' has no option '{unknown[0]}'. " + did_you_mean(unknown[0], _PERTURB))
    settings = {"steps": 20, "step_size": threat.budget / 4, "random_start": False} | options
    noise = Noise.for_batch(seed, len(x), x.device)
    parts = [slice(start, start + chunk) for start in range(0, len(x), chunk)]
    return torch.cat([perturb(model, x[part], y[part], threat, noise=noise[part], **settings) for part in parts])


@torch.no_grad()
def _accuracy(model: nn.Module, x: Tensor, y: Tensor, chunk: int) -> Tensor:
    right = [(model(part).argmax(1) == label) for part, label in zip(x.split(chunk), y.split(chunk), strict=True)]
    return torch.cat(right).to(x.dtype).mean()
