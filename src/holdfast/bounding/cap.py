"""The convex adversarial polytope: bounds by the dual network."""

from torch import Tensor, nn

from holdfast.bounding.core.region import BALLS, region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import dual
from holdfast.bounding.linear import relaxation as linear
from holdfast.registry import Bound
from holdfast.results import Bounds
from holdfast.threats import Threat

REFERENCE = (
    "Wong and Kolter, Provable defenses against adversarial examples via the convex outer adversarial polytope, 2018"
)


@Bound(
    "cap",
    summary="dual of the convex adversarial polytope, for sequential ReLU networks",
    threats=BALLS,
    reference=REFERENCE,
)
def cap(model: nn.Module, x: Tensor, threat: Threat, *, sound: bool = True) -> Bounds:
    """Bound the logits by dual passes.

    Args:
        model: from (B, ...) to logits (B, K), affine layers and ReLUs in sequence.  x: inputs, shape (B, ...).
        threat: a ball; the valid range of the inputs is used.
        sound: account for rounding; computes the equal bound of `fastlin`, which has the error terms.
    """
    graph, r = trace(model, x, threat), region(threat, x, sound=sound)
    dual.check_chain(graph)
    if sound:
        return Bounds(*linear.output_bounds(linear.relaxation(graph, r, slopes="parallel", hidden=True, sound=True)))
    return Bounds(*dual.output_bounds(dual.polytope(graph, r)))
