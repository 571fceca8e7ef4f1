"""ATTA: one step from the perturbation that the last epoch left.

Perturbations live in the frame of the padded training images, so that crops and flips of an image see the same one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import steepest
from holdfast.attacks.core.losses import Loss
from holdfast.attacks.pgd import BALLS
from holdfast.registry import Part, register
from holdfast.training.attack.pgd import Mode, gradient_at
from holdfast.training.context import Context
from holdfast.utils.options import Epochs, Positive

_CACHE, _DRAWN = "delta", "drawn"


def _read(x: Tensor, context: Context, reset_every: int) -> tuple[Tensor, Tensor]:
    """The cached frames of the batch, and the points x + delta that they stand for; a random start the first time."""
    state, transform = context.state, context.transform
    margin = transform.margin if x.ndim == 4 else 0
    size = [*x.shape[1:2], *(n + 2 * margin for n in x.shape[2:])] if margin else list(x.shape[1:])
    if _CACHE not in state:
        state[_CACHE] = torch.zeros(context.count, *size, dtype=x.dtype, device=x.device)
        state[_DRAWN] = torch.zeros(context.count, dtype=torch.int64, device=x.device)
    frame = state[_CACHE][context.index]
    # For each example by itself: beside additional data, an epoch may see an example twice or not at all.
    turn = 1 + (context.epoch // reset_every if reset_every else 0)
    fresh = state[_DRAWN][context.index] != turn
    if bool(fresh.any()):
        centre = torch.full_like(frame, (context.threat.low + context.threat.high) / 2)
        random = context.threat.random_start(centre, context.noise) - centre
        frame = torch.where(fresh.view(-1, *[1] * (x.ndim - 1)), random, frame)
        state[_DRAWN][context.index] = turn
    return frame, context.threat.project(x + transform.read(frame), x)


def cached_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    size: Callable[[Tensor], Tensor | float],
    *,
    reset_every: int,
    mode: Mode,
) -> Tensor:
    """One step from the cached perturbation of each example, which then becomes the cached one; shape of x.

    Args:
        model, x, y, loss, context: as for any attack.
        size: the length of the step, from the gradients (B, ...).
        reset_every: epochs after which all perturbations are drawn anew; 0 for never.
        mode: mode of the model while it is attacked.
    """
    threat = context.threat
    frame, start = _read(x, context, reset_every)
    gradient = gradient_at(model, start, y, loss, mode)
    x_adv = threat.project(start + size(gradient) * steepest(threat, gradient, start, 0.01), x)
    context.state[_CACHE][context.index] = context.transform.write(x_adv - x, frame)
    return x_adv


@register(
    Part(
        "atta",
        part="attack",
        summary="one step from the perturbation that the last epoch left",
        reference="Zheng et al., Efficient adversarial training with transferable adversarial examples, 2020",
        threats=BALLS,
        single_step=True,
    )
)
def atta(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    *,
    step: Positive = 0.5,
    reset_every: Epochs = 0,
    mode: Mode = "eval",
) -> Tensor:
    """project(x + delta_i + step * budget * steepest(gradient)), which becomes delta_i; shape of x.

    Args:
        step: in units of the budget; 4/255 at 8/255.
        reset_every: epochs after which all perturbations are drawn anew; 0 for never.
        mode: mode of the model while it is attacked.
    """
    size = step * context.threat.budget
    return cached_step(model, x, y, loss, context, lambda gradient: size, reset_every=reset_every, mode=mode)
