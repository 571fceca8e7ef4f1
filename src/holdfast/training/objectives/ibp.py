"""IBP: certified training with interval bounds."""

from torch import Tensor, nn

from holdfast.bounding.core.region import BALLS
from holdfast.registry import Objective, register
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import certified_step, interval_bound, mixed
from holdfast.utils.options import Unit


@register(
    Objective(
        "ibp",
        summary="certified training with interval bounds: cheap, and the base of the best results",
        reference="Gowal et al., On the effectiveness of interval bound propagation for training verifiably "
        "robust models, "
        "2018",
        threats=BALLS,
        takes=("regularizers",),
        certificate="ibp",
        bounded=True,
    )
)
def ibp(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, kappa_start: Unit = 1.0, kappa_end: Unit = 0.0
) -> tuple[Tensor, Metrics]:
    """kappa CE(z(x), y) + (1 - kappa) CE(-m, y), m by intervals.

    Args:
        kappa_start: share of the clean loss while the budget is zero.
        kappa_end: and where it is full; the paper takes 0.5.
    """
    return certified_step(model, x, y, context, interval_bound, kappa=mixed(kappa_start, kappa_end, context))
