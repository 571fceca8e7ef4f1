"""Networks without an activation: one affine map, whose margins have exact bounds over boxes and sparse sets."""

import torch
from torch import Tensor

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relaxation import Relaxation

AFFINE = ops.Input | ops.Affine | ops.Reshape | ops.Add | ops.Concat


def is_affine(graph: Graph) -> bool:
    """True if the network is an affine map: layers, reshapes, sums and concatenations, but no activation."""
    return all(isinstance(node.op, AFFINE) for node in graph.nodes)


def interval_bounds(graph: Graph, region: Region, *, sound: bool) -> interval.Interval:
    """Interval bounds of the logits, (B, K) each; by their own rows if the network is affine."""
    if not is_affine(graph):
        return linear.relaxation(graph, region, slopes=None, hidden=False, sound=sound).intervals[-1]
    return linear.output_bounds(linear.relaxation(graph, region, slopes="adaptive", hidden=False, sound=sound))


def interval_margins(graph: Graph, r: Relaxation, y: Tensor) -> Tensor:
    """Interval bounds of z_y - z_j, (B, K); zero at j = y.

    In an affine network the rows of the differences are carried to the input and meet the region itself. Merged into
    the last layer, they would meet the box around the region: for sparse changes that is the whole valid range.

    Args:
        graph: the network.
        r: relaxation of the network, or of all its nodes but the last.
        y: labels (B,).
    """
    found = interval.margins(graph, r.intervals, y, sound=r.sound)
    if not is_affine(graph) or _merged(graph, r.region):
        return found
    # Rows of all classes for each input: as many inputs at a time as the rows of a backward pass may take.
    count = max(1, linear.MEMORY // (found.shape[1] * r.region.x[:1].numel()))
    parts = torch.arange(len(y), device=y.device).split(count)
    return torch.maximum(found, torch.cat([_own_rows(graph, r.region.select(i), y[i], sound=r.sound) for i in parts]))


def _merged(graph: Graph, region: Region) -> bool:
    """True if merging the differences into the last layer is exact: it reads a box, value by value."""
    last = graph.nodes[-1]
    box = region.threat is None and all(isinstance(n.op, ops.Scale | ops.Reshape) for n in graph.nodes[1:-1])
    return box and isinstance(last.op, ops.Linear) and len(last.shape) == 1


def _own_rows(graph: Graph, region: Region, y: Tensor, *, sound: bool) -> Tensor:
    relaxed = linear.relaxation(graph, region, slopes="adaptive", hidden=False, sound=sound)
    return linear.margin_bounds(relaxed, y)
