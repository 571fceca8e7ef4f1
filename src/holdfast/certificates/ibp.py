"""Interval bound propagation as a certificate."""

from torch import Tensor, nn

from holdfast.bounding.core.region import REGIONS
from holdfast.certificates.core.margins import certify_margins, interval_margins
from holdfast.certificates.core.radius_search import bisection
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.utils.options import Count


@Certificate(
    "ibp",
    summary="interval bounds of the margins; for patches one box for every location",
    threats=REGIONS,
    reference="Gowal et al., On the effectiveness of interval bound propagation, 2018; Chiang et al., 2020 (patches)",
    radius=bisection(interval_margins),
)
def ibp(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True, chunk_boxes: Count = 1024
) -> CertifyResult:
    """Certified if the interval bound of every margin z_y - z_j is above zero.

    Prefer it for networks trained with it; on others it proves almost nothing beyond tiny budgets. On a ball the first
    layer is bounded by the dual norm; `chunk_boxes` boxes are in memory at a time, for patches.
    """
    return certify_margins(model, x, y, threat, "ibp", interval_margins, sound=sound, chunk=chunk_boxes)
