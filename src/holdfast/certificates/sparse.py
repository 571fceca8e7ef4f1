"""Changes of any k pixels: intervals with the exact bound of the first layer."""

from torch import Tensor, nn

from holdfast.certificates.core.margins import certify_margins, interval_margins
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Sparse


@Certificate(
    "sparse",
    summary="intervals with the exact bound of the first layer over any k pixels",
    threats=("sparse",),
    reference="Chiang et al., Certified defenses for adversarial patches, 2020 (sparse attacks)",
)
def sparse(model: nn.Module, x: Tensor, y: Tensor, threat: Sparse, *, sound: bool = True) -> CertifyResult:
    """The first layer adds the k largest gains of each neuron, later layers are intervals."""
    return certify_margins(model, x, y, threat, "sparse", interval_margins, sound=sound)
