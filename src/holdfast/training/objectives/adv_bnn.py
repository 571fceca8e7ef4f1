"""Adv-BNN: adversarial training of Gaussian weights, held near their prior."""

from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.models.random import gaussian_divergence
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.step import cross_entropy_family, robust_step
from holdfast.utils.options import NotNegative


@Objective(
    "adv-bnn",
    summary="adversarial training of random weights, with their divergence from the prior; for the model 'adv-bnn'",
    reference="Liu et al., Adv-BNN: improved adversarial defense through robust Bayesian neural network, 2019",
    threats=BALLS,
    takes=("attack", "targets", "regularizers"),
    random=True,
)
def adv_bnn(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, divergence_weight: NotNegative = 0.02
) -> tuple[Tensor, Metrics]:
    """Cross-entropy at x' plus divergence_weight / N * KL(posterior || prior), N the number of training examples.

    Each pass draws the weights anew, also each step of the attack. A model without Gaussian weights has no divergence:
    for it this is adversarial training.

    Args:
        divergence_weight: alpha_KL of Lee's thesis (2021), which takes 0.02.
    """
    loss, metrics = robust_step(model, x, y, context, cross_entropy_family("ce"))
    # With weight 0 the divergence is not even looked at: without noise it is infinite.
    divergence = gaussian_divergence(model) if divergence_weight > 0 else None
    if divergence is None:
        return loss, metrics
    divergence = divergence / context.count
    return loss + divergence_weight * divergence, {**metrics, "divergence": divergence.detach()}
