"""Lipschitz-margin training: one constant for all pairs of classes."""

from torch import Tensor, nn

from holdfast.certificates.core.lipschitz_margins import NORMS
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.lipschitz import estimated, margin_loss, metrics
from holdfast.utils.options import Count


@Objective(
    "lmt",
    summary="Lipschitz-margin training: margins above sqrt(2) times the budget times the constant of the network",
    reference="Tsuzuku, Sato and Sugiyama, Lipschitz-margin training: scalable certification of perturbation "
    "invariance for deep neural networks, 2018",
    threats=NORMS,
    certificate="lipschitz",
)
def lmt(model: nn.Module, x: Tensor, y: Tensor, context: Context, *, steps: Count = 1) -> tuple[Tensor, Metrics]:
    """CE(z + sqrt(2) eps K, y): K, the constant of the map to all logits by `steps` of power iteration, for i != y."""
    bound, logits = estimated(model, x, context, steps, single=True)
    losses = margin_loss(logits, y, bound.pairs, context.threat.budget)
    return losses.mean(), metrics(logits, y, bound, context)
