"""SABR: certified training on small boxes around adversarial examples.

Interval bounds over the whole threat set regularise more than needed. The small box around an adversarial example is an
easier task; tighter bounds prove afterwards what it trains.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.core.region import Region
from holdfast.bounding.fast.layout import channels_last
from holdfast.bounding.graph.trace import trace_batch
from holdfast.registry import Objective
from holdfast.threats import Linf
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import interval_bound, margin_metrics, mixed, with_penalties
from holdfast.training.schedules import with_budget
from holdfast.training.step import attacked
from holdfast.utils.options import Unit


@Objective(
    "sabr",
    summary="certified training on small boxes around adversarial examples",
    reference="Müller et al., Certified training: small boxes are all you need, 2023",
    threats=("linf",),
    takes=("attack", "regularizers"),
    certificate="crown-ibp",
    bound="ibp",
    bounded=True,
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

    `box`, the paper's lambda, is 1 for `ibp`, 0 for adversarial training.
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
