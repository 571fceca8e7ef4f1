"""alpha-CROWN: CROWN with lower slopes optimised for each input."""

from torch import Tensor, nn

from holdfast.bounding.core.logits import logit_bounds
from holdfast.bounding.core.region import REGIONS, Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.interval import Interval
from holdfast.bounding.linear.alpha import ASCENT, Ascent, output_bounds
from holdfast.registry import Bound
from holdfast.results import Bounds
from holdfast.threats import Threat
from holdfast.utils.options import Count


@Bound(
    "alpha-crown",
    summary="CROWN with lower slopes optimised by gradient ascent, per neuron and per output",
    threats=REGIONS,
    reference="Xu et al., Fast and complete: enabling complete verification with massively parallel incomplete "
    "verifiers, 2021",
)
def alpha_crown(
    model: nn.Module, x: Tensor, threat: Threat, *, ascent: Ascent = ASCENT, sound: bool = True, chunk: Count = 64
) -> Bounds:
    """Bound the logits by CROWN with optimised slopes.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).
        threat: any.
        ascent: how to optimise the slopes; `Ascent(joint=True)` includes the slopes of the hidden layers.
        sound: account for rounding.
        chunk: boxes in memory at a time, for patches.
    """

    def one(graph: Graph, r: Region) -> Interval:
        return output_bounds(graph, r, ascent, sound=sound)

    return logit_bounds(model, x, threat, one, sound=sound, chunk=chunk)
