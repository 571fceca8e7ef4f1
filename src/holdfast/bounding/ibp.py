"""Interval bound propagation: a box through every layer."""

from torch import Tensor, nn

from holdfast.bounding.core.logits import logit_bounds
from holdfast.bounding.core.region import REGIONS, Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.interval import Interval
from holdfast.bounding.linear.affine import interval_bounds
from holdfast.registry import Bound
from holdfast.results import Bounds
from holdfast.threats import Threat
from holdfast.utils.options import Count


@Bound(
    "ibp",
    summary="interval bound propagation: a box through every layer, at the cost of two forward passes",
    threats=REGIONS,
    reference="Gowal et al., On the effectiveness of interval bound propagation, 2018; Mirman et al., 2018",
)
def ibp(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True, chunk: Count = 1024) -> Bounds:
    """Bound the logits by intervals.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).
        threat: any; on a ball the first layer is bounded by the dual norm.
        sound: widen every interval by what rounding can do.
        chunk: boxes in memory at a time.
    """

    def one(graph: Graph, r: Region) -> Interval:
        return interval_bounds(graph, r, sound=sound)

    return logit_bounds(model, x, threat, one, sound=sound, chunk=chunk)
