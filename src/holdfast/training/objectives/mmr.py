"""The maximum margin regulariser: wide linear regions, and decision boundaries that stay away from the input.

A ReLU network is affine around x: hidden unit j is z_j = <V_j, x'> + a_j there. Its sign changes no sooner than at the
distance d_j = |z_j| / |V_j|_q, where the linear region may end. Inside the region the decision boundary of class s is
at D_s = (z_y - z_s) / |V_y - V_s|_q, negative if x is misclassified. With the k_B nearest of the former and the k_D
nearest of the latter

MMR = mean of max(0, 1 - d_j / gamma_B) + mean of max(0, 1 - D_s / gamma_D)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.core.region import BALLS, Region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import Coefficients, Window, clean
from holdfast.bounding.linear.relax import PIECEWISE
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.certificates.core.distance import norm_of
from holdfast.errors import UnsupportedError
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.per import DUAL, accuracy, full_budget, hinge, others
from holdfast.training.step import attacked
from holdfast.utils.options import Count, NotNegative, Positive, Unit, options_from

_PAPER = "Croce, Andriushchenko and Hein, Provable robustness of ReLU networks via maximization of linear regions, 2019"


def local_map(graph: Graph, x: Tensor) -> Relaxation:
    """The network as the affine map that it is around x: a relaxation over the point x, whose lines are exact."""
    for node in graph.nodes:
        bent = isinstance(node.op, ops.Activation) and node.op.kind not in PIECEWISE
        if bent or isinstance(node.op, ops.MaxPool | ops.MinMax):
            kind = node.op.kind if isinstance(node.op, ops.Activation) else type(node.op).__name__
            raise UnsupportedError(
                f"layer '{node.name}': 'mmr' measures the linear regions of networks of affine layers and ReLUs, and "
                f"has no rule for {kind}; use 'per', which needs only linear bounds"
            )
    return linear.relaxation(graph, Region(x, x, x), slopes="parallel", hidden=False, sound=False)


def region_distances(r: Relaxation, q: float) -> Tensor:
    """|z_j| / |V_j|_q of all hidden units of all layers, (B, units); infinite for a unit that is constant around x."""
    layers = []
    for i in linear.hidden_layers(r.graph):
        shape, z = r.graph.nodes[i].shape, r.intervals[i][0]
        if len(shape) == 3:  # places first, as the rows are
            z = z.flatten(2).mT
        norms = _norms(r, linear.backward(r, i, _unit_rows(shape, z)).coefficients, q)
        if norms.ndim == 3:  # rows that are the same at every place are held once
            norms = norms.expand(-1, *z.shape[1:]).flatten(1)
        layers.append(_ratio(z.abs().flatten(1), norms))
    return torch.cat(layers, 1)


def boundary_distances(r: Relaxation, y: Tensor, q: float) -> Tensor:
    """(z_y - z_s) / |V_y - V_s|_q of all classes s but y, (B, K - 1)."""
    norms = _norms(r, linear.margin_planes(r, y).coefficients, q)
    z = r.intervals[-1][0]
    return _ratio(others(z.gather(1, y[:, None]) - z, y), others(norms, y))


def _unit_rows(shape: ops.Shape, like: Tensor) -> Coefficients:
    """One row for each unit of a layer; the rows of a feature map are windows of one place."""
    units = torch.eye(shape[0] if len(shape) == 3 else torch.Size(shape).numel(), dtype=like.dtype, device=like.device)
    if len(shape) == 3:
        places = torch.arange(shape[1] * shape[2], device=like.device)[None]
        return Coefficients(units[None, None, :, :, None, None], Window(places, (shape[1], shape[2]), (1, 1), (0, 0)))
    return Coefficients(units.view(1, len(units), *shape))


def _norms(r: Relaxation, c: Coefficients, q: float) -> Tensor:
    c = clean(c, r.graph.nodes[0].shape)
    norms: Tensor = torch.linalg.vector_norm(c.values.flatten(len(c.rows)), q, dim=-1)
    return norms


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """top / bottom; where the bottom is 0, infinite, or 0 on the wrong side."""
    moves = bottom > 0
    constant = torch.where(top < 0, 0.0, torch.inf).to(top)
    return torch.where(moves, top / torch.where(moves, bottom, torch.ones_like(bottom)), constant)


def regularizer(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    gamma_b: Positive = 1.5,  # distance of the region's boundary that is far enough, in units of the full budget
    gamma_d: Positive = 1.5,  # the same for the decision boundaries
    k_b: Unit = 0.2,  # share of the hidden units that are penalised at most, the nearest ones, at the start of the run
    k_b_end: Unit = 0.05,  # and at its end; linear in between
    k_d: Count = 9,  # how many classes are penalised at most, the nearest ones
) -> Tensor:
    """Mean of MMR over the batch, a scalar. Zero while the budget is."""
    q, full = DUAL[norm_of(context.threat)], full_budget(context)
    if full == 0:
        return x.new_zeros(())
    r = local_map(graph, x)
    regions, boundaries = region_distances(r, q), boundary_distances(r, y, q)
    share = k_b + (k_b_end - k_b) * context.progress
    nearest, classes = max(1, round(share * regions.shape[1])), min(k_d, boundaries.shape[1])
    losses = hinge(regions, gamma_b * full, nearest) / nearest + hinge(boundaries, gamma_d * full, classes) / classes
    return losses.mean()


@Objective(
    "mmr",
    summary="wide linear regions and distant decision boundaries, for ReLU networks",
    reference=_PAPER,
    threats=BALLS,
    certificate="fastlin",
)
@options_from(regularizer)
def mmr(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, weight: NotNegative = 0.5, **options: Any
) -> tuple[Tensor, Metrics]:
    """CE(z(x), y) + weight MMR(x), for affine layers and ReLUs; see the top of this file, `regularizer` for options.

    Memory grows as batch x hidden units x input values.
    """
    graph, logits = trace_batch(model, x)
    value = regularizer(graph, x, y, context, **options)
    metrics = {"accuracy": accuracy(logits, y), "mmr": value.detach()}
    return cross_entropy(logits, y) + weight * value, metrics


@Objective(
    "mmr-at",
    summary="mmr at adversarial examples, with their loss",
    reference=_PAPER,
    threats=BALLS,
    takes=("attack",),
    certificate="fastlin",
)
@options_from(regularizer)
def mmr_at(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, weight: NotNegative = 0.5, **options: Any
) -> tuple[Tensor, Metrics]:
    """(CE(z(x), y) + CE(z(x'), y)) / 2 + weight MMR(x') with x' from the attack."""
    x_adv = attacked(model, x, y, context)
    logits = model(x)
    graph, logits_adv = trace_batch(model, x_adv)
    value = regularizer(graph, x_adv, y, context, **options)
    loss = (cross_entropy(logits, y) + cross_entropy(logits_adv, y)) / 2
    metrics = {"accuracy": accuracy(logits, y), "robust_accuracy": accuracy(logits_adv, y), "mmr": value.detach()}
    return loss + weight * value, metrics
