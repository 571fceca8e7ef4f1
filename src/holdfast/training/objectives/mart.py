"""MART: adversarial training that weighs misclassified inputs more."""

from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.step import Family, Terms, Views, divergence, fit, robust_step, stops_gradient
from holdfast.training.top_curvature import trace_ce, trace_doubted_kl, trace_margin
from holdfast.utils.options import NotNegative


def margin_loss(logits: Tensor, y: Tensor) -> Tensor:
    """-log(1 - max_{k != y} s_k), (B,), s the softmax: the log-sum-exp of all logits less that without the rival k.

    In this form it keeps its gradient where 1 - s_k underflows.
    """
    rival = logits.detach().scatter(1, y[:, None], -torch.inf).argmax(1, keepdim=True)
    return logits.logsumexp(1) - logits.scatter(1, rival, -torch.inf).logsumexp(1)


@Objective(
    "mart",
    summary="adversarial training with a margin, and a divergence that weighs on misclassified inputs",
    reference="Wang et al., Improving adversarial robustness requires revisiting misclassified examples, 2020",
    threats=BALLS,
    pairs=lambda **_: True,
    takes=("attack", "targets", "regularizers", "perturb_weights"),
)
def mart(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    weight: NotNegative = 5.0,
    fit_at: Literal["adv", "clean"] = "adv",
    stop_gradient: bool | None = None,
) -> tuple[Tensor, Metrics]:
    """Mean of CE(x', y) - log(1 - max_{k != y} s_k(x')) + weight * KL(s(x) || s(x')) (1 - s_y(x)), s the softmax.

    fit_at="clean" takes the cross-entropy at x, not at x' as published. For `stop_gradient` see `stops_gradient`.
    """
    stop = stops_gradient(stop_gradient, context)

    def terms(views: Views) -> Terms:
        clean, adv = views.pair
        anchor = clean.logits.detach() if stop else clean.logits
        wrong = 1 - anchor.softmax(1).gather(1, views.y[:, None])[:, 0]
        fitted = fit((adv if fit_at == "adv" else clean).logits, views.target)
        return Terms(fitted + margin_loss(adv.logits, views.y), weight * divergence(anchor, adv.logits) * wrong)

    def trace(views: Views, bias: bool) -> Terms:
        clean, adv = views.pair
        at = adv if fit_at == "adv" else clean
        doubted = trace_doubted_kl(clean, adv, views.y, stop_gradient=stop, bias=bias)
        return Terms(trace_ce(at, bias=bias) + trace_margin(adv, views.y, bias=bias), weight * doubted)

    return robust_step(model, x, y, context, Family("ce", True, terms, trace))
