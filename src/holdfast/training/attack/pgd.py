"""The inner maximum by projected gradient ascent, fresh for every batch."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS, perturb
from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import Loss
from holdfast.errors import InputError
from holdfast.registry import Part
from holdfast.training.context import Context, Precision, in_bfloat16, in_mode
from holdfast.utils.options import Count, Positive

Mode = Literal["eval", "train"]
NUDGE = 1e-3  # standard deviation of a start just off x, of Zhang et al., 2019


def gradient_at(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, mode: Mode) -> Tensor:
    """Gradient of the loss of each input with respect to it, shape of x; the model in `mode` meanwhile."""
    with in_mode(model, mode == "train"), frozen(model):
        return input_gradient(model, x, y, loss)[0]


@Part(
    "pgd",
    part="attack",
    summary="inner maximum by projected gradient ascent from a random start",
    reference="Madry et al., Towards deep learning models resistant to adversarial attacks, 2018",
    threats=BALLS,
    default=True,
)
def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    *,
    steps: Count = 10,
    step_size: Positive | None = None,  # in the threat's unit; 2.5 * budget / steps of the scheduled budget if None
    per_budget: bool = False,  # besides, as many steps of step_size as go into the scheduled budget
    random_start: bool = True,
    mode: Mode = "eval",
    precision: Precision = "full",  # "bfloat16": of the attack's passes; the loss stays in full precision
) -> Tensor:
    """The last of `steps` steps of projected gradient ascent on `loss`, (logits, y) -> (B,); shape of x.

    With `per_budget` there are round(budget / step_size) + `steps` steps, budget / 0.01 + 10 in Liu et al., "On the
    loss landscape of adversarial training", 2020: fewer while a budget rises. Without `step_size`, the size of the
    steps follows the budget instead: a quarter of it for 10 steps.

    Without `random_start` it starts at x with a little Gaussian noise, since the gradient of a loss that compares with
    the output at x vanishes at x itself. With the model in mode "train" batch norm uses the statistics of the attacked
    batch and updates its running ones at every step of the attack, as the first public code did.
    """
    threat, noise = context.threat, context.noise
    if per_budget:
        if step_size is None:
            raise InputError(
                "attack.per_budget: needs attack.step_size, the length of a step in the unit of the threat"
            )
        steps += round(threat.budget / step_size)
    start = None if random_start else threat.project(x + NUDGE * noise.normal(x.shape[1:], x.dtype), x)
    first = torch.full_like(y, steps)  # steps until the first misclassified iterate
    taken = 0

    def watch(logits: Tensor) -> None:
        nonlocal taken
        first[(logits.argmax(1) != y) & (first == steps)] = taken
        taken += 1

    size = 2.5 * threat.budget / steps if step_size is None else step_size
    how: dict[str, Any] = {"noise": noise, "steps": steps, "step_size": size, "loss": loss, "start": start}
    with in_mode(model, mode == "train"), in_bfloat16(x, precision):
        x_adv = perturb(model, x, y, threat, watch=watch, **how)
    context.notes["kappa"] = first.to(x.dtype) / steps
    return x_adv
