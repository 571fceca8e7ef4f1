"""Certified training: the loss of the worst outputs that a bound cannot rule out.

With m_j a proven lower bound of z_y - z_j over the threat set, m_y = 0, the cross-entropy of the logits -m is at least
the loss of every input in the set. The objectives here differ in the bound:

loss = kappa CE(z(x), y) + (1 - kappa) CE(-m, y),    m = (1 - beta) m_interval + beta m_linear

kappa and beta move with the budget: from their start while it is zero to their end where it is full.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.core.region import BALLS, Region, region
from holdfast.bounding.fast.layout import channels_last
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.linear import affine
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.bounding.linear.slopes import (
    LowerSlopes,
    bernoulli_slopes,
    chord_slopes,
    optimised_slopes,
    random_slopes,
)
from holdfast.random import Noise
from holdfast.registry import Objective, register
from holdfast.threats import Linf, Threat
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.standard import fit_terms, fit_trace
from holdfast.training.outputs import Output
from holdfast.training.step import Family, Taken, Terms, Views, penalties
from holdfast.utils.options import Count, Positive, Unit

Bound = Callable[[Graph, Region, Tensor], tuple[Tensor, Relaxation]]
"""From a network, a region and labels (B,) to lower bounds of z_y - z_j, (B, K), and the relaxed network."""
Rule = Literal["adaptive", "chord", "random", "bernoulli"]


def interval_bound(graph: Graph, r: Region, y: Tensor) -> tuple[Tensor, Relaxation]:
    """Margins by intervals, the last layer merged with the differences."""
    r = replace(r, lower=channels_last(r.lower), upper=channels_last(r.upper))
    relaxed = linear.relaxation(Graph(graph.nodes[:-1]), r, slopes=None, hidden=False, sound=False)
    return affine.interval_margins(graph, relaxed, y), relaxed


def linear_bound(beta: float, slopes: Callable[[Relaxation, Tensor], LowerSlopes | None]) -> Bound:
    """Margins by one backward pass on interval bounds, mixed with those by intervals: beta of the former."""
    if beta == 0:
        return interval_bound

    def bound(graph: Graph, r: Region, y: Tensor) -> tuple[Tensor, Relaxation]:
        if r.threat is None:  # on a box, where no pass through windows needs planes
            r = replace(r, lower=channels_last(r.lower), upper=channels_last(r.upper))
        relaxed = linear.relaxation(graph, r, slopes="adaptive", hidden=False, sound=False)
        margins = linear.margin_bounds(relaxed, y, slopes(relaxed, y))
        if beta < 1:
            margins = beta * margins + (1 - beta) * affine.interval_margins(graph, relaxed, y)
        return margins, relaxed

    return bound


def slope_rule(rule: Rule, p: float, q: float, noise: Noise) -> Callable[[Relaxation, Tensor], LowerSlopes | None]:
    """The lower slopes of `crown-ibp` by name; None leaves CROWN's own."""
    match rule:
        case "adaptive":
            return lambda r, y: None
        case "chord":
            return lambda r, y: chord_slopes(r)
        case "random":
            return lambda r, y: random_slopes(r, noise=noise)
        case "bernoulli":
            return lambda r, y: bernoulli_slopes(r, p, q, noise=noise)


def certified_loss(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    bound: Bound = interval_bound,
    *,
    use_logits: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Relaxation | None]:
    """CE(-m, y) of each example, (B,); the logits (B, K); the margins m (B, K); the relaxed network.

    Without a budget there is nothing to bound: m_j = z_y - z_j, and no relaxed network.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: a ball.
        bound: of the margins.
        use_logits: False if the loss looks at the margins alone; the logits then come without gradients.
    """
    boxes = isinstance(threat, Linf)
    x = channels_last(x) if boxes else x
    unroll = boxes and bound is interval_bound
    graph, logits = trace_batch(model, x, use_logits=use_logits or threat.budget == 0, unroll=unroll)
    if threat.budget == 0:
        return cross_entropy(logits, y, reduction="none"), logits, logits.gather(1, y[:, None]) - logits, None
    margins, relaxed = bound(graph, region(threat, x, sound=False), y)
    return cross_entropy(-margins, y, reduction="none"), logits, margins, relaxed


def certified_step(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, bound: Bound, *, kappa: float
) -> tuple[Tensor, Metrics]:
    """Loss (a scalar) and metrics of one batch; see the top of this file."""
    robust, logits, margins, relaxed = certified_loss(model, x, y, context.threat, bound, use_logits=kappa > 0)
    natural = cross_entropy(logits, y, reduction="none")
    loss, figures = with_penalties((1 - kappa) * robust + kappa * natural, model, x, y, logits, relaxed, context)
    return loss, {**margin_metrics(logits, margins, y), "robust_loss": robust.detach().mean(), **figures}


def with_penalties(
    losses: Tensor, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor, relaxed: Relaxation | None, context: Context
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of the losses (B,) and the regularisers of the recipe, which see the relaxed network."""
    views, family = Views(None, Output(logits), y, y), Family("none", False, fit_terms, fit_trace)
    penalty, figures = penalties(Taken(model, None, x, x, views, Terms(losses), family, context, relaxed))
    return losses.mean() + penalty, figures


@torch.no_grad()
def margin_metrics(logits: Tensor, margins: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Shares of the batch that are classified right, and that are proved to stay so."""
    proved = (margins > 0).scatter(1, y[:, None], True).all(1)
    return {
        "accuracy": (logits.argmax(1) == y).to(logits.dtype).mean(),
        "verified": proved.to(logits.dtype).mean(),
    }


def mixed(start: float, end: float, context: Context) -> float:
    """From `start` to `end` along the rise of the budget."""
    return start + (end - start) * context.ramp


@register(
    Objective(
        "ibp",
        summary="certified training with interval bounds: cheap, and the base of the best results",
        reference="Gowal et al., On the effectiveness of interval bound propagation for training verifiably "
        "robust models, "
        "2018",
        threats=BALLS,
        takes=("regularizers",),
        certificate="ibp",
        bounded=True,
    )
)
def ibp(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, kappa_start: Unit = 1.0, kappa_end: Unit = 0.0
) -> tuple[Tensor, Metrics]:
    """kappa CE(z(x), y) + (1 - kappa) CE(-m, y), m by intervals.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        kappa_start: share of the clean loss while the budget is zero.
        kappa_end: and where it is full; the paper takes 0.5.
    """
    return certified_step(model, x, y, context, interval_bound, kappa=mixed(kappa_start, kappa_end, context))


@register(
    Objective(
        "crown-ibp",
        summary="certified training with linear bounds of the margins on interval bounds inside",
        reference="Zhang et al., Towards stable and efficient training of verifiably robust neural networks, 2020",
        threats=BALLS,
        takes=("regularizers",),
        certificate="crown-ibp",
        bounded=True,
    )
)
def crown_ibp(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    kappa_start: Unit = 1.0,
    kappa_end: Unit = 0.0,
    beta_start: Unit = 1.0,
    beta_end: Unit = 0.0,
    slopes: Rule = "adaptive",
    p: Unit = 0.0,
    q: Unit = 1.0,
) -> tuple[Tensor, Metrics]:
    """As `ibp` with m = (1 - beta) m_interval + beta m_linear.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        kappa_start, kappa_end: share of the clean loss.
        beta_start, beta_end: share of the linear bound. 1 and 0 as published; 1 and 1 for linear bounds throughout.
        slopes: of the line below an unstable ReLU: "adaptive" is CROWN's, "chord" the slope of the line above,
            "random" uniform, "bernoulli" 0 or 1 by chance (Lee et al., "Towards better understanding of training
            certifiably robust models against adversarial examples", 2021).
        p, q: of "bernoulli": chance of slope 1 where |l| > |u|, and elsewhere. 0 and 1 are CROWN's rule.
    """
    bound = linear_bound(mixed(beta_start, beta_end, context), slope_rule(slopes, p, q, context.noise))
    return certified_step(model, x, y, context, bound, kappa=mixed(kappa_start, kappa_end, context))


@register(
    Objective(
        "slope-step",
        summary="certified training with lower slopes chosen for each input by a gradient step: tight and smooth",
        reference="Lee et al., Towards better understanding of training certifiably robust models against adversarial "
        "examples, 2021",
        threats=BALLS,
        takes=("regularizers",),
        certificate="crown-ibp",
        bounded=True,
    )
)
def slope_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    kappa_start: Unit = 1.0,
    kappa_end: Unit = 0.0,
    steps: Count = 1,
    step_size: Positive = 2.0,
) -> tuple[Tensor, Metrics]:
    """As `crown-ibp` with beta = 1 and lower slopes found by signed gradient steps on the certified loss.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        kappa_start, kappa_end: share of the clean loss.
        steps: gradient steps; the paper's variant with several takes 7.
        step_size: of a slope, per step; the variant with several takes 0.1.
    """

    def chosen(r: Relaxation, y: Tensor) -> LowerSlopes:
        return optimised_slopes(r, y, noise=context.noise, steps=steps, step_size=step_size)

    bound = linear_bound(1.0, chosen)
    return certified_step(model, x, y, context, bound, kappa=mixed(kappa_start, kappa_end, context))
