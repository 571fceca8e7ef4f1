"""IBP: certified training with interval bounds."""

from typing import Any

from torch import Tensor, nn

from holdfast.bounding.core.region import BALLS
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import certified_step, interval_bound
from holdfast.utils.options import options_from


@Objective(
    "ibp",
    summary="certified training with interval bounds: cheap, and the base of the best results",
    reference="Gowal et al., On the effectiveness of interval bound propagation for training verifiably robust models, "
    "2018",
    threats=BALLS,
    takes=("regularizers",),
    certificate="ibp",
    bounded=True,
)
@options_from(certified_step)
def ibp(model: nn.Module, x: Tensor, y: Tensor, context: Context, **kappa: Any) -> tuple[Tensor, Metrics]:
    """kappa CE(z(x), y) + (1 - kappa) CE(-m, y), m by intervals; the paper ends with kappa = 0.5."""
    return certified_step(model, x, y, context, interval_bound, **kappa)
