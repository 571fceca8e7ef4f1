"""Fast-Lin as a certificate: linear bounds of the margins with one slope per neuron."""

from functools import partial

from torch import Tensor, nn

from holdfast.bounding.core.region import REGIONS
from holdfast.certificates.core.margins import certify_margins, decided_margins, linear_margins
from holdfast.certificates.core.radius_search import bisection
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.utils.options import Count

fastlin_margins = partial(linear_margins, slopes="parallel", hidden=True)


@Certificate(
    "fastlin",
    summary="linear bounds of the margins with one slope per neuron, by backward passes for every layer",
    threats=REGIONS,
    reference="Weng et al., Towards fast computation of certified robustness for ReLU networks, 2018",
    radius=bisection(fastlin_margins),
)
def fastlin(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True, chunk_boxes: Count = 64
) -> CertifyResult:
    """Both lines of a neuron have the same slope."""
    decided = partial(decided_margins, slopes="parallel", hidden=True)
    return certify_margins(model, x, y, threat, "fastlin", decided, sound=sound, chunk=chunk_boxes)
