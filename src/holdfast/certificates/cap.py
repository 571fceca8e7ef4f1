"""The convex adversarial polytope: a certificate by the dual network."""

from torch import Tensor, nn

from holdfast.bounding.cap import REFERENCE
from holdfast.bounding.core.region import BALLS, Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import dual
from holdfast.certificates.core.margins import certify_margins, decided_margins
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Threat


def cap_margins(graph: Graph, r: Region, y: Tensor, *, sound: bool) -> Tensor:
    """Lower bounds of z_y - z_j, (B, K).

    The dual pass is written for real arithmetic. With `sound` the same bound is therefore computed by backward
    substitution with parallel lines, which carries the rounding-error terms; the network is held to the same layers.
    """
    dual.check_chain(graph)
    if sound:
        return decided_margins(graph, r, y, slopes="parallel", hidden=True, sound=True)
    return dual.margin_bounds(dual.polytope(graph, r), y)


@Certificate(
    "cap",
    summary="dual of the convex adversarial polytope, for sequential ReLU networks",
    threats=BALLS,
    reference=REFERENCE,
)
def cap(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True) -> CertifyResult:
    """Certified if the dual bound of every margin is above zero.

    It equals `fastlin` up to rounding and covers less; on convolutions `fastlin` is faster, as it keeps to windows. Use
    it to compare with published figures; `crown` is usually tighter. The rounding-error term of `sound=True` comes from
    the equal bound of `fastlin`.
    """
    return certify_margins(model, x, y, threat, "cap", cap_margins, sound=sound)
