"""Adversarial training: the loss at the worst input that the attack finds."""

from torch import Tensor, nn

from holdfast.attacks.pgd import BALLS
from holdfast.registry import register
from holdfast.train.context import Context, Metrics
from holdfast.train.curvature import trace_ce
from holdfast.train.objectives.standard import fit_terms, fit_trace
from holdfast.train.step import Family, Terms, Views, divergence, fit, robust_step
from holdfast.train.validate import NotNegative


@register(
    "train",
    "at",
    part="objective",
    summary="adversarial training: cross-entropy at the inputs that the attack finds",
    reference="Madry et al., Towards deep learning models resistant to adversarial attacks, 2018",
    threats=BALLS,
)
def adversarial(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, divergence_weight: NotNegative = 0.0
) -> tuple[Tensor, Metrics]:
    """Mean of max over x' in the threat set of -log softmax(z(x'))_y, the maximum by the attack of the recipe.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        divergence_weight: of KL(softmax(z(x)) || softmax(z(x'))), the anchor for fine-tuning on additional data (Liu
            et al., "On the impact of hard adversarial instances on overfitting in adversarial training", 2021).
    """
    if divergence_weight == 0:
        return robust_step(model, x, y, context, Family("ce", False, fit_terms, fit_trace))

    def terms(views: Views) -> Terms:
        clean, adv = views.pair
        return Terms(fit(adv.logits, views.target), divergence_weight * divergence(clean.logits, adv.logits))

    def trace(views: Views, bias: bool) -> Tensor:
        # With the clean output held fixed, the divergence has the curvature of the cross-entropy.
        return (1 + divergence_weight) * trace_ce(views.adv.z, views.adv.logits, bias=bias)

    return robust_step(model, x, y, context, Family("ce", True, terms, trace))
