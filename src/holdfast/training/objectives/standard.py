"""Training without an adversary: the baseline."""

from torch import Tensor, nn

from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.step import cross_entropy_family, robust_step


@Objective(
    "standard",
    summary="cross-entropy on the inputs as they are",
    reference="Goodfellow, Bengio and Courville, Deep Learning, 2016, section 6.2",
    takes=("targets", "regularizers", "perturb_weights"),
)
def standard(model: nn.Module, x: Tensor, y: Tensor, context: Context) -> tuple[Tensor, Metrics]:
    """Mean of -log softmax(z(x))_y. A threat in the recipe is used for validation only."""
    return robust_step(model, x, y, context, cross_entropy_family("none"))
