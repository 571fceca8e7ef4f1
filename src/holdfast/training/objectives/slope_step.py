"""Certified training with lower slopes that a gradient step chooses for each input."""

from typing import Any

from torch import Tensor, nn

from holdfast.bounding.core.region import BALLS
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.bounding.linear.slopes import LowerSlopes, optimised_slopes
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import certified_step, linear_bound
from holdfast.utils.options import Count, Positive, options_from


@Objective(
    "slope-step",
    summary="certified training with lower slopes chosen for each input by a gradient step: tight and smooth",
    reference="Lee et al., Towards better understanding of training certifiably robust models against adversarial "
    "examples, 2021",
    threats=BALLS,
    takes=("regularizers",),
    certificate="crown-ibp",
    bounded=True,
)
@options_from(certified_step)
def slope_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    steps: Count = 1,
    step_size: Positive = 2.0,
    **kappa: Any,
) -> tuple[Tensor, Metrics]:
    """As `crown-ibp` with beta = 1 and lower slopes found by signed gradient steps on the certified loss.

    Args:
        steps: gradient steps; the paper's variant with several takes 7.
        step_size: change of a slope per step; the variant with several takes 0.1.
    """

    def chosen(r: Relaxation, y: Tensor) -> LowerSlopes:
        return optimised_slopes(r, y, noise=context.noise, steps=steps, step_size=step_size)

    return certified_step(model, x, y, context, linear_bound(1.0, chosen), **kappa)
