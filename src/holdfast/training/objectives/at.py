"""Adversarial training: the loss at the worst input that the attack finds."""

from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics, Precision
from holdfast.training.step import Family, Terms, Views, cross_entropy_family, divergence, fit, robust_step
from holdfast.training.top_curvature import trace_ce, trace_kl
from holdfast.utils.options import NotNegative


@Objective(
    "at",
    summary="adversarial training: cross-entropy at the inputs that the attack finds",
    reference="Madry et al., Towards deep learning models resistant to adversarial attacks, 2018",
    threats=BALLS,
    pairs=lambda divergence_weight, **_: divergence_weight > 0,
    takes=("attack", "targets", "regularizers", "perturb_weights"),
)
def at(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    divergence_weight: NotNegative = 0.0,
    precision: Precision = "full",
) -> tuple[Tensor, Metrics]:
    """Mean of max over x' in the threat set of -log softmax(z(x'))_y, the maximum by the attack of the recipe.

    Args:
        divergence_weight: weight of KL(softmax(z(x)) || softmax(z(x'))), the anchor for fine-tuning on additional data
            (Liu et al., "On the impact of hard adversarial instances on overfitting in adversarial training", 2021).
            Its gradient goes through both outputs.
        precision: "bfloat16" computes the passes of the loss in bfloat16 (autocast); weights, loss, regularisers and
            the optimiser keep their own type. `attack.precision` does the same for the attack.
    """
    if divergence_weight == 0:
        return robust_step(model, x, y, context, cross_entropy_family("ce"), precision=precision)

    def terms(views: Views) -> Terms:
        clean, adv = views.pair
        return Terms(fit(adv.logits, views.target), divergence_weight * divergence(clean.logits, adv.logits))

    def trace(views: Views, bias: bool) -> Terms:
        clean, adv = views.pair
        kl = trace_kl(clean, adv, stop_gradient=False, bias=bias)
        return Terms(trace_ce(adv, bias=bias), divergence_weight * kl)

    return robust_step(model, x, y, context, Family("ce", True, terms, trace), precision=precision)
