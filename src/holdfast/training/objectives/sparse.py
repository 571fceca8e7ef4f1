"""Certified training against changes of a few pixels: the exact bound of the first layer, then intervals."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.linear import affine
from holdfast.bounding.linear import relaxation as linear
from holdfast.errors import InputError
from holdfast.registry import Objective
from holdfast.threats import Sparse
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import margin_metrics

GAINS = 2**21
"""Gains in memory at a time: one for each input, neuron and pixel."""


@Objective(
    "sparse",
    summary="interval bounds after the exact bound of the first layer over any k pixels",
    reference="Chiang et al., Certified defenses for adversarial patches, 2020 (sparse attacks)",
    threats=("sparse",),
    certificate="sparse",
    ramps=True,
)
def sparse(model: nn.Module, x: Tensor, y: Tensor, context: Context) -> tuple[Tensor, Metrics]:
    """Mean of CE(-m, y), m lower bounds of z_y - z_j over all changes of at most k pixels.

    Each neuron of the first layer gains most from the k pixels with the largest gains, with each pixel at the better
    end of its range. While the budget rises, a pixel moves by at most that share of the valid range.

    Departs from the paper, whose gains are the k largest weights, whatever the pixel: ours are smaller, and exact.
    """
    threat = context.threat
    if not isinstance(threat, Sparse):
        raise InputError(f"threat: this objective trains against sparse changes, such as 'sparse:4', got '{threat}'")
    graph, logits = trace_batch(model, x)
    margins = sparse_margins(graph, x, y, threat, context.ramp * (threat.high - threat.low))
    return cross_entropy(-margins, y), margin_metrics(logits, margins, y)


def sparse_margins(graph: Graph, x: Tensor, y: Tensor, threat: Sparse, reach: float) -> Tensor:
    """Lower bounds of z_y - z_j where k pixels change by at most `reach`, shape (B, K)."""
    lower, upper = (x - reach).clamp(min=threat.low), (x + reach).clamp(max=threat.high)
    flat, ends, at = 0, (lower, upper), x
    while isinstance(graph.nodes[flat + 1].op, ops.Scale | ops.Reshape):  # the image of a box is a box
        flat += 1
        ends, at = interval.step(graph.nodes[flat], [ends], sound=False), ops.evaluate(graph.nodes[flat].op, [at])
    op, rest = graph.nodes[flat + 1].op, graph.nodes[flat + 2 :]
    alone = all(j > flat for node in rest for j in node.inputs)
    if isinstance(op, ops.Linear) and alone and not affine.is_affine(graph):
        pixels = x[0, 0].numel() if x.ndim == 4 else x[0].numel()
        bounds = dense_bounds(op, at, *ends, pixels=pixels, k=min(threat.k, pixels))
        return interval.margin_bounds(graph.after(flat + 1), *bounds, y, sound=False)
    r = linear.relaxation(graph, Region(lower, upper, x, threat), slopes=None, hidden=False, sound=False)
    return affine.interval_margins(graph, r, y)


def dense_bounds(op: ops.Linear, x: Tensor, lower: Tensor, upper: Tensor, *, pixels: int, k: int) -> interval.Interval:
    """W x + b minus and plus the sum of the k largest gains of each neuron, (B, M) each.

    The same as `linear.relaxation` gives, in less memory and time: which pixels count is found without gradients. The
    D = C P values of an input (B, D), P `pixels` in each channel, are the first channel, then the second, ...
    """
    middle, weight = op.apply(x), op.weight.unflatten(1, (-1, pixels))
    down, up = (lower - x).unflatten(1, (-1, pixels)), (upper - x).unflatten(1, (-1, pixels))
    return middle + _least(weight, down, up, k), middle - _least(-weight, down, up, k)


def _least(weight: Tensor, down: Tensor, up: Tensor, k: int) -> Tensor:
    """Least sum of <weight, change> over k pixels, (B, M); weight (M, C, P), down <= 0 <= up (B, C, P)."""
    count = max(1, GAINS // (weight.shape[0] * weight.shape[2]))
    parts = zip(down.split(count), up.split(count), strict=True)
    index = torch.cat([_pixels(weight, *part, k) for part in parts])
    batch, neurons = index.shape[:2]
    channels = (-1, weight.shape[1], -1)
    w = weight.gather(2, index.transpose(0, 1).reshape(neurons, 1, -1).expand(channels)).unflatten(2, (batch, k))
    at = index.reshape(batch, 1, -1).expand(channels)
    fall, rise = (ends.gather(2, at).unflatten(2, (neurons, k)).transpose(0, 2) for ends in (down, up))
    return torch.where(w > 0, w * fall, w * rise).sum((1, 3)).T


@torch.no_grad()
def _pixels(weight: Tensor, down: Tensor, up: Tensor, k: int) -> Tensor:
    """The k pixels with the largest gains for every neuron, (B, M, k)."""
    positive, negative = weight.clamp(min=0), weight.clamp(max=0)
    change = down.new_zeros(len(down), len(weight), weight.shape[2])
    for c in range(weight.shape[1]):
        change.addcmul_(positive[None, :, c], down[:, None, c]).addcmul_(negative[None, :, c], up[:, None, c])
    return change.topk(k, dim=2, largest=False).indices
