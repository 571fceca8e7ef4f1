"""Perturbations that are kept for each example from epoch to epoch, one step added each time.

They live in the frame of the padded training images, so that crops and flips of the same image see the same one.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS, steepest
from holdfast.attacks.core.losses import Loss
from holdfast.registry import Part, register
from holdfast.training.attack.pgd import Mode, gradient_at
from holdfast.training.context import Context
from holdfast.utils.options import Epochs, Fraction, NotNegative, Positive

_CACHE, _DRAWN, _GRADIENTS = "delta", "drawn", "squared gradient"


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


def _write(x_adv: Tensor, x: Tensor, frame: Tensor, context: Context) -> None:
    context.state[_CACHE][context.index] = context.transform.write(x_adv - x, frame)


@register(
    Part(
        "atta",
        part="attack",
        summary="one step from the perturbation that the last epoch left",
        reference="Zheng et al., Efficient adversarial training with transferable adversarial examples, 2020",
        threats=BALLS,
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
        mode: of the model while it is attacked.
    """
    threat = context.threat
    frame, start = _read(x, context, reset_every)
    gradient = gradient_at(model, start, y, loss, mode)
    x_adv = threat.project(start + step * threat.budget * steepest(threat, gradient, start, 0.01), x)
    _write(x_adv, x, frame, context)
    return x_adv


@register(
    Part(
        "atas",
        part="attack",
        summary="as atta, with a step that shrinks where the input gradient is large",
        reference="Huang et al., Fast adversarial training with adaptive step size, 2022",
        threats=BALLS,
    )
)
def atas(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    *,
    step: Positive = 2.0,
    c: Positive = 0.01,
    beta: Fraction = 0.5,
    form: Literal["c+sqrt(v)", "sqrt(v+c)"] = "c+sqrt(v)",
    smallest: NotNegative = 0.0,
    largest: Positive = 1e9,
    warmup: Epochs = 0,
    reset_every: Epochs = 0,
    mode: Mode = "eval",
) -> Tensor:
    """As `atta`, with the step alpha / (c + sqrt(v_i)), where v_i <- beta v_i + (1 - beta) |gradient|_2^2.

    The gradient is that of the mean loss of the batch, as in the authors' release, so c belongs to a batch size. Where
    the gradient vanishes the step is alpha / c, which they set to twice the budget. The formula in print has
    alpha / sqrt(v_i + c), which does not agree with that; it is `form = "sqrt(v+c)"`.

    Args:
        step: alpha / c, in units of the budget: the step where the gradient vanishes (16/255 at 8/255).
        c: of the formula.
        beta: memory of the squared norm of the gradient.
        smallest, largest: limits of the step, in units of the budget (4/255 and 14/255 in the release).
        warmup: epochs at the start with a step of one budget (5 in the release).
        reset_every: epochs after which all perturbations are drawn anew; 0 for never (10 in the release).
        mode: of the model while it is attacked.
    """
    threat, state = context.threat, context.state
    frame, start = _read(x, context, reset_every)
    gradient = gradient_at(model, start, y, loss, mode)
    if _GRADIENTS not in state:
        state[_GRADIENTS] = torch.zeros(context.count, dtype=x.dtype, device=x.device)
    squared = (gradient / len(x)).flatten(1).square().sum(1)
    v = beta * state[_GRADIENTS][context.index] + (1 - beta) * squared
    state[_GRADIENTS][context.index] = v
    size = step * c / (c + v.sqrt() if form == "c+sqrt(v)" else (v + c).sqrt())
    size = torch.ones_like(v) if context.epoch < warmup else size.clamp(smallest, largest)
    context.notes["step"] = size
    size = size.view(-1, *[1] * (x.ndim - 1)) * threat.budget
    x_adv = threat.project(start + size * steepest(threat, gradient, start, 0.01), x)
    _write(x_adv, x, frame, context)
    return x_adv
