"""Losses that compare the output at the adversarial input with that at the clean one: TRADES, ALP and MART."""

from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.registry import Objective, register
from holdfast.training.context import Context, Metrics
from holdfast.training.curvature import (
    trace_ce,
    trace_doubted_kl,
    trace_kl,
    trace_logit_pairing,
    trace_margin,
    trace_pairing,
)
from holdfast.training.step import Family, Terms, Views, divergence, fit, robust_step
from holdfast.utils.options import NotNegative


def _stops(stop_gradient: bool | None, context: Context) -> bool:
    """Where the recipe does not say: the published loss keeps the gradient, its curvature penalty stops it."""
    trh = context.parts.regularizers.get("trh")
    penalised = trh is not None and trh.keywords.get("weight") != 0  # weight 0 is the base method
    return penalised if stop_gradient is None else stop_gradient


@register(
    Objective(
        "trades",
        summary="cross-entropy at the input plus the worst divergence from its output",
        reference="Zhang et al., Theoretically principled trade-off between robustness and accuracy, 2019",
        threats=BALLS,
        takes=("attack", "targets", "regularizers", "perturb_weights"),
    )
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
    """Mean of CE(x, y) + weight * max over x' of KL(softmax(z(x)) || softmax(z(x'))).

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        weight: of the divergence.
        stop_gradient: hold the clean output of the divergence fixed; by default only beside the regulariser `trh`.
    """
    stop = _stops(stop_gradient, context)

    def terms(views: Views) -> Terms:
        clean, adv = views.pair
        anchor = clean.logits.detach() if stop else clean.logits
        return Terms(fit(clean.logits, views.target), weight * divergence(anchor, adv.logits))

    def trace(views: Views, bias: bool) -> Terms:
        clean, adv = views.pair
        kl = trace_kl(clean.z, clean.logits, adv.z, adv.logits, stop_gradient=stop, bias=bias)
        return Terms(trace_ce(clean.z, clean.logits, bias=bias), weight * kl)

    return robust_step(model, x, y, context, Family("kl", True, terms, trace))


@register(
    Objective(
        "alp",
        summary="adversarial training plus the distance between the outputs at x and x'",
        reference="Kannan, Kurakin and Goodfellow, Adversarial logit pairing, 2018",
        threats=BALLS,
        takes=("attack", "targets", "regularizers", "perturb_weights"),
    )
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

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        weight: of the distance.
        pair: s is the softmax output, or the logits, as first published.
        stop_gradient: hold s(x) fixed; by default only beside the regulariser `trh`.
    """
    stop = _stops(stop_gradient, context)

    def terms(views: Views) -> Terms:
        clean, adv = views.pair
        first = clean.logits.detach() if stop else clean.logits
        s, s_adv = (first.softmax(1), adv.logits.softmax(1)) if pair == "softmax" else (first, adv.logits)
        return Terms(fit(adv.logits, views.target), weight * (s - s_adv).square().sum(1))

    def trace(views: Views, bias: bool) -> Terms:
        clean, adv = views.pair
        if pair == "softmax":
            pairing = trace_pairing(clean.z, clean.logits, adv.z, adv.logits, stop_gradient=stop, bias=bias)
        else:
            pairing = trace_logit_pairing(clean.z, adv.z, clean.logits.shape[1], stop_gradient=stop, bias=bias)
        return Terms(trace_ce(adv.z, adv.logits, bias=bias), weight * pairing)

    return robust_step(model, x, y, context, Family("ce", True, terms, trace))


def margin_loss(logits: Tensor, y: Tensor) -> Tensor:
    """-log(1 - max_{k != y} s_k), (B,), s the softmax: the log-sum-exp of all logits less that without the rival k.

    In this form it keeps its gradient where 1 - s_k underflows.
    """
    rival = logits.detach().scatter(1, y[:, None], -torch.inf).argmax(1, keepdim=True)
    return logits.logsumexp(1) - logits.scatter(1, rival, -torch.inf).logsumexp(1)


@register(
    Objective(
        "mart",
        summary="adversarial training with a margin, and a divergence that weighs on misclassified inputs",
        reference="Wang et al., Improving adversarial robustness requires revisiting misclassified examples, 2020",
        threats=BALLS,
        takes=("attack", "targets", "regularizers", "perturb_weights"),
    )
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

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        weight: of the divergence.
        fit_at: where the cross-entropy is taken: x' as published, or "clean".
        stop_gradient: hold s(x) fixed; by default only beside the regulariser `trh`.
    """
    stop = _stops(stop_gradient, context)

    def terms(views: Views) -> Terms:
        clean, adv = views.pair
        anchor = clean.logits.detach() if stop else clean.logits
        wrong = 1 - anchor.softmax(1).gather(1, views.y[:, None])[:, 0]
        fitted = fit((adv if fit_at == "adv" else clean).logits, views.target)
        return Terms(fitted + margin_loss(adv.logits, views.y), weight * divergence(anchor, adv.logits) * wrong)

    def trace(views: Views, bias: bool) -> Terms:
        clean, adv = views.pair
        at = adv if fit_at == "adv" else clean
        margin = trace_margin(adv.z, adv.logits, views.y, bias=bias)
        pair = (clean.z, clean.logits, adv.z, adv.logits)
        doubted = trace_doubted_kl(*pair, views.y, stop_gradient=stop, bias=bias)
        return Terms(trace_ce(at.z, at.logits, bias=bias) + margin, weight * doubted)

    return robust_step(model, x, y, context, Family("ce", True, terms, trace))
