"""ATAS: one step from the cached perturbation, smaller where the input gradient is large."""

from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.losses import Loss
from holdfast.attacks.pgd import BALLS
from holdfast.registry import Part, register
from holdfast.training.attack.atta import cached_step
from holdfast.training.attack.pgd import Mode
from holdfast.training.context import Context
from holdfast.utils.options import Epochs, Fraction, NotNegative, Positive

_GRADIENTS = "squared gradient"


@register(
    Part(
        "atas",
        part="attack",
        summary="as atta, with a step that shrinks where the input gradient is large",
        reference="Huang et al., Fast adversarial training with adaptive step size, 2022",
        threats=BALLS,
        single_step=True,
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

    The gradient is taken of the mean loss of the batch, as in the authors' release, so c belongs to a batch size. Where
    the gradient vanishes the step is alpha / c, which they set to twice the budget. The formula in print has
    alpha / sqrt(v_i + c), which does not agree with that; it is `form = "sqrt(v+c)"`.

    Args:
        step: alpha / c, in units of the budget: the step where the gradient vanishes (16/255 at 8/255).
        c: constant of the formula.
        beta: memory of the squared norm of the gradient.
        smallest, largest: limits of the step, in units of the budget (4/255 and 14/255 in the release).
        warmup: epochs at the start with a step of one budget (5 in the release).
        reset_every: epochs after which all perturbations are drawn anew; 0 for never (10 in the release).
        mode: mode of the model while it is attacked.
    """
    state = context.state
    if _GRADIENTS not in state:
        state[_GRADIENTS] = torch.zeros(context.count, dtype=x.dtype, device=x.device)

    def adapted(gradient: Tensor) -> Tensor:
        squared = (gradient / len(x)).flatten(1).square().sum(1)
        v = beta * state[_GRADIENTS][context.index] + (1 - beta) * squared
        state[_GRADIENTS][context.index] = v
        size = step * c / (c + v.sqrt() if form == "c+sqrt(v)" else (v + c).sqrt())
        size = torch.ones_like(v) if context.epoch < warmup else size.clamp(smallest, largest)
        context.notes["step"] = size
        return size.view(-1, *[1] * (x.ndim - 1)) * context.threat.budget

    return cached_step(model, x, y, loss, context, adapted, reset_every=reset_every, mode=mode)
