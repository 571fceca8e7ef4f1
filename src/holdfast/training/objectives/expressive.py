"""Certified training that trades the tightness of the bound for an easier task: small boxes, and mixtures of losses.

Interval bounds over the whole threat set regularise more than needed. Both objectives here start from an adversarial
example: one bounds a small box around it, the other mixes its loss with that of the whole set. What they train is
proved afterwards by tighter bounds.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.core.region import BALLS, Region
from holdfast.bounding.fast.layout import channels_last
from holdfast.bounding.graph.trace import trace_batch
from holdfast.registry import Objective, register
from holdfast.threats import Linf
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.certified import (
    certified_loss,
    interval_bound,
    margin_metrics,
    mixed,
    with_penalties,
)
from holdfast.training.schedules import with_budget
from holdfast.training.step import attacked
from holdfast.utils.options import Positive, Unit


@register(
    Objective(
        "sabr",
        summary="certified training on small boxes around adversarial examples",
        reference="Müller et al., Certified training: small boxes are all you need, 2023",
        threats=("linf",),
        takes=("attack", "regularizers"),
        certificate="crown-ibp",
        bound="ibp",
        bounded=True,
    )
)
def sabr(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    box: Unit = 0.4,
    kappa_start: Unit = 1.0,
    kappa_end: Unit = 0.0,
) -> tuple[Tensor, Metrics]:
    """CE(-m, y), m by intervals over the box of radius tau = box * eps around x', which is found within eps - tau of x.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        box: tau in units of the budget (the paper's lambda): 1 is `ibp`, 0 is adversarial training.
        kappa_start, kappa_end: share of the clean loss.
    """
    threat, kappa = context.threat, mixed(kappa_start, kappa_end, context)
    assert isinstance(threat, Linf)
    x_adv = x
    if threat.eps > 0 and box < 1:
        x_adv = attacked(model, x, y, replace(context, adversary=with_budget(threat, 1 - box)))
    graph, logits = trace_batch(model, channels_last(x), use_logits=kappa > 0, unroll=True)
    tau = box * threat.eps
    small = Region((x_adv - tau).clamp(min=threat.low), (x_adv + tau).clamp(max=threat.high), x_adv)
    margins, relaxed = interval_bound(graph, small, y)
    robust = cross_entropy(-margins, y, reduction="none")
    natural = cross_entropy(logits, y, reduction="none")
    loss, figures = with_penalties((1 - kappa) * robust + kappa * natural, model, x, y, logits, relaxed, context)
    return loss, {**margin_metrics(logits, margins, y), "robust_loss": robust.detach().mean(), **figures}


@register(
    Objective(
        "mtl-ibp",
        summary="certified training on a mixture of the adversarial loss and its interval bound",
        reference="De Palma et al., Expressive losses for verified robustness via convex combinations, 2024",
        threats=BALLS,
        takes=("attack", "regularizers"),
        certificate="crown-ibp",
        bound="ibp",
        bounded=True,
    )
)
def mtl_ibp(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, alpha: Unit = 0.1, bound_budget: Positive = 1.0
) -> tuple[Tensor, Metrics]:
    """(1 - alpha) CE(z(x'), y) + alpha CE(-m, y), m by intervals over the whole threat set.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        alpha: share of the bound: 1 is `ibp`, 0 is adversarial training. Small values need tight certificates.
        bound_budget: of the bound, in units of that of the attack (the paper attacks a larger set at small budgets).
    """
    threat = context.threat
    robust, logits, margins, relaxed = certified_loss(model, x, y, with_budget(threat, bound_budget), use_logits=False)
    adversarial = robust
    if threat.budget > 0 and alpha < 1:
        adversarial = cross_entropy(model(attacked(model, x, y, context)), y, reduction="none")
    loss, figures = with_penalties(alpha * robust + (1 - alpha) * adversarial, model, x, y, logits, relaxed, context)
    figures |= {"robust_loss": robust.detach().mean(), "adversarial_loss": adversarial.detach().mean()}
    return loss, {**margin_metrics(logits, margins, y), **figures}
