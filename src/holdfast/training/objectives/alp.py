"""Adversarial logit pairing: a penalty on the distance between the outputs at x and at x'."""

from typing import Literal

from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.step import Family, Terms, Views, fit, robust_step, stops_gradient
from holdfast.training.top_curvature import trace_ce, trace_logit_pairing, trace_pairing
from holdfast.utils.options import NotNegative


@Objective(
    "alp",
    summary="adversarial training plus the distance between the outputs at x and x'",
    reference="Kannan, Kurakin and Goodfellow, Adversarial logit pairing, 2018",
    threats=BALLS,
    pairs=lambda **_: True,
    takes=("attack", "targets", "regularizers", "perturb_weights"),
)
def alp(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    weight: NotNegative = 0.5,
    pair: Literal["softmax", "logits"] = "softmax",
    stop_gradient: bool | None = None,
) -> tuple[Tensor, Metrics]:
    """Mean of CE(x', y) + weight * |s(x) - s(x')|_2^2, with x' the worst input for the cross-entropy.

    With pair="logits", as first published, s is the logits; else the softmax. For `stop_gradient` see `stops_gradient`.
    """
    stop = stops_gradient(stop_gradient, context)

    def terms(views: Views) -> Terms:
        clean, adv = views.pair
        first = clean.logits.detach() if stop else clean.logits
        s, s_adv = (first.softmax(1), adv.logits.softmax(1)) if pair == "softmax" else (first, adv.logits)
        return Terms(fit(adv.logits, views.target), weight * (s - s_adv).square().sum(1))

    def trace(views: Views, bias: bool) -> Terms:
        clean, adv = views.pair
        form = trace_pairing if pair == "softmax" else trace_logit_pairing
        return Terms(trace_ce(adv, bias=bias), weight * form(clean, adv, stop_gradient=stop, bias=bias))

    return robust_step(model, x, y, context, Family("ce", True, terms, trace))
