"""ATAS: one step from the cached perturbation, smaller where the input gradient is large."""

from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.attacks.core.losses import Loss
from holdfast.registry import Part
from holdfast.threats import per_input
from holdfast.training.attack.atta import cached_step
from holdfast.training.attack.pgd import Mode
from holdfast.training.context import Context
from holdfast.utils.options import Count, Epochs, Fraction, NotNegative, Positive

_GRADIENTS = "squared gradient"


@Part(
    "atas",
    part="attack",
    summary="as atta, with a step that shrinks where the input gradient is large",
    reference="Huang et al., Fast adversarial training with adaptive step size, 2022",
    threats=BALLS,
    single_step=True,
)
def atas(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    *,
    step: Positive = 2.0,  # alpha / c, in units of the budget: the step where the gradient vanishes (16/255 at 8/255)
    c: Positive = 0.01,
    beta: Fraction = 0.5,  # memory of the squared norm of the gradient
    form: Literal["c+sqrt(v)", "sqrt(v+c)"] = "c+sqrt(v)",
    smallest: NotNegative = 0.0,  # least step, in units of the budget (4/255 in the release)
    largest: Positive = 1e9,  # (14/255 in the release)
    warmup: Epochs = 0,  # epochs at the start with a step of one budget (5 in the release)
    reset_every: Epochs = 0,  # as for `atta` (10 in the release)
    resolution: Count | None = None,  # as for `atta` (32 in print for ImageNet)
    mode: Mode = "eval",
) -> Tensor:
    """As `atta`, with the step alpha / (c + sqrt(v_i)), where v_i <- beta v_i + (1 - beta) |gradient|_2^2.

    The gradient is taken of the mean loss of the batch, as in the authors' release, so c belongs to a batch size. Where
    the gradient vanishes the step is alpha / c, which they set to twice the budget. The formula in print has
    alpha / sqrt(v_i + c), which does not agree with that; it is `form = "sqrt(v+c)"`.
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
        return per_input(size, x) * context.threat.budget

    return cached_step(
        *(model, x, y, loss, context, adapted), reset_every=reset_every, resolution=resolution, mode=mode
    )
