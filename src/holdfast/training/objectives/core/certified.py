"""The certified loss: the loss of the worst outputs that a bound cannot rule out.

With m_j a proven lower bound of z_y - z_j over the threat set, m_y = 0, the cross-entropy of the logits -m is at least
the loss of every input in the set. The objectives differ in the bound:

loss = kappa CE(z(x), y) + (1 - kappa) CE(-m, y),    m = (1 - beta) m_interval + beta m_linear

kappa and beta follow the budget: they move from `kappa_start` and `beta_start` while it is zero to `kappa_end` and
`beta_end` where it is full.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.core.region import Region, region
from holdfast.bounding.fast.layout import channels_last
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.linear import affine
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.bounding.linear.slopes import LowerSlopes
from holdfast.threats import Linf, Threat
from holdfast.training.context import Context, Metrics
from holdfast.training.outputs import Output
from holdfast.training.step import Taken, Terms, Views, cross_entropy_family, penalties
from holdfast.utils.options import Unit

Bound = Callable[[Graph, Region, Tensor], tuple[Tensor, Relaxation]]
"""From a network, a region and labels (B,) to lower bounds of z_y - z_j, (B, K), and the relaxed network."""


def interval_bound(graph: Graph, r: Region, y: Tensor) -> tuple[Tensor, Relaxation]:
    """Margins by intervals, the last layer merged with the differences."""
    r = replace(r, lower=channels_last(r.lower), upper=channels_last(r.upper))
    relaxed = linear.relaxation(Graph(graph.nodes[:-1]), r, slopes=None, hidden=False, sound=False)
    return affine.interval_margins(graph, relaxed, y), relaxed


def linear_bound(beta: float, slopes: Callable[[Relaxation, Tensor], LowerSlopes | None]) -> Bound:
    """Margins by one backward pass on interval bounds: a share beta of them, the rest margins by intervals."""
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


def certified_loss(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, bound: Bound = interval_bound, *, use_logits: bool = True
) -> tuple[Tensor, Tensor, Tensor, Relaxation | None]:
    """CE(-m, y) of each example, (B,); the logits (B, K); the margins m (B, K); the relaxed network.

    Without a budget there is nothing to bound: m_j = z_y - z_j, and no relaxed network. With use_logits=False, for a
    loss that looks only at the margins, the logits come without gradients.
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
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    bound: Bound,
    *,
    kappa_start: Unit = 1.0,
    kappa_end: Unit = 0.0,
) -> tuple[Tensor, Metrics]:
    """Loss (a scalar) and metrics of one batch; see the top of this file."""
    kappa = mixed(kappa_start, kappa_end, context)
    robust, logits, margins, relaxed = certified_loss(model, x, y, context.threat, bound, use_logits=kappa > 0)
    natural = cross_entropy(logits, y, reduction="none")
    loss, figures = with_penalties((1 - kappa) * robust + kappa * natural, model, x, y, logits, relaxed, context)
    return loss, {**margin_metrics(logits, margins, y), "robust_loss": robust.detach().mean(), **figures}


def with_penalties(
    losses: Tensor, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor, relaxed: Relaxation | None, context: Context
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of the losses (B,) and the regularisers of the recipe, which see the relaxed network."""
    views, family = Views(None, Output(logits), y, y), cross_entropy_family("none")
    penalty, figures = penalties(Taken(model, None, x, x, views, Terms(losses), family, context, relaxed))
    return losses.mean() + penalty, figures


@torch.no_grad()
def margin_metrics(logits: Tensor, margins: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Shares of the batch that are classified right, and that are proved to stay so."""
    proved = (margins > 0).scatter(1, y[:, None], True).all(1)
    return {"accuracy": (logits.argmax(1) == y).to(logits.dtype).mean(), "verified": proved.to(logits.dtype).mean()}


def mixed(start: float, end: float, context: Context) -> float:
    """From `start` to `end` along the rise of the budget."""
    return start + (end - start) * context.ramp
