"""TRADES: the loss at the input, and the worst divergence from the output there."""

from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.step import Family, Terms, Views, divergence, fit, robust_step, stops_gradient
from holdfast.training.top_curvature import trace_ce, trace_kl
from holdfast.utils.options import NotNegative


@Objective(
    "trades",
    summary="cross-entropy at the input plus the worst divergence from its output",
    reference="Zhang et al., Theoretically principled trade-off between robustness and accuracy, 2019",
    threats=BALLS,
    pairs=lambda **_: True,
    takes=("attack", "targets", "regularizers", "perturb_weights"),
)
def trades(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    weight: NotNegative = 6.0,
    stop_gradient: bool | None = None,
) -> tuple[Tensor, Metrics]:
    """Mean of CE(x, y) + weight * max over x' of KL(softmax(z(x)) || softmax(z(x'))); see also `stops_gradient`."""
    stop = stops_gradient(stop_gradient, context)

    def terms(views: Views) -> Terms:
        clean, adv = views.pair
        anchor = clean.logits.detach() if stop else clean.logits
        return Terms(fit(clean.logits, views.target), weight * divergence(anchor, adv.logits))

    def trace(views: Views, bias: bool) -> Terms:
        clean, adv = views.pair
        kl = trace_kl(clean, adv, stop_gradient=stop, bias=bias)
        return Terms(trace_ce(clean, bias=bias), weight * kl)

    return robust_step(model, x, y, context, Family("kl", True, terms, trace))
