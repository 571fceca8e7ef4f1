"""Bounds of the logits over a whole threat set, from bounds over one region."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.bounding.core.placements import boxes
from holdfast.bounding.core.region import Region, region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.interval import Interval
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relax import Slopes
from holdfast.results import Bounds
from holdfast.threats import Patch, Threat


def logit_bounds(
    model: nn.Module,
    x: Tensor,
    threat: Threat,
    one: Callable[[Graph, Region], Interval],
    *,
    sound: bool,
    chunk: int,
) -> Bounds:
    """Bound the logits over the threat set; for patches, take the union over all locations.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).
        threat: what the adversary may do.
        one: bounds of the logits of a graph over one region, (B, K) each.
        sound: account for the rounding of the region itself.
        chunk: boxes in memory at a time, for patches.
    """
    graph = trace(model, x, threat)
    if not isinstance(threat, Patch):
        return Bounds(*one(graph, region(threat, x, sound=sound)))
    lowers, uppers = [], []
    for lower, upper, m in boxes(threat, x, sound=sound, chunk=chunk):
        low, high = one(graph, Region(lower, upper, x.repeat_interleave(m, 0)))
        lowers.append(low.unflatten(0, (-1, m)).amin(1))
        uppers.append(high.unflatten(0, (-1, m)).amax(1))
    return Bounds(torch.stack(lowers).amin(0), torch.stack(uppers).amax(0))


def linear_logit_bounds(
    model: nn.Module, x: Tensor, threat: Threat, *, slopes: Slopes, hidden: bool, sound: bool, chunk: int
) -> Bounds:
    """`logit_bounds` by backward substitution; `slopes` and `hidden` as for `linear.relaxation`."""

    def one(graph: Graph, r: Region) -> Interval:
        return linear.output_bounds(linear.relaxation(graph, r, slopes=slopes, hidden=hidden, sound=sound))

    return logit_bounds(model, x, threat, one, sound=sound, chunk=chunk)
