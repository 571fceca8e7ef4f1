"""CROWN and CROWN-IBP as certificates: linear bounds of the margins with two slopes per neuron."""

from functools import partial

from torch import Tensor, nn

from holdfast.bounding.core.region import REGIONS
from holdfast.certificates.core.margins import certify_margins, decided_margins, linear_margins
from holdfast.certificates.core.radius_search import bisection
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.utils.options import Count

crown_margins = partial(linear_margins, slopes="adaptive", hidden=True)
crown_ibp_margins = partial(linear_margins, slopes="adaptive", hidden=False)


@Certificate(
    "crown",
    summary="linear bounds of the margins with two slopes, by backward passes for every layer",
    threats=REGIONS,
    reference="Zhang et al., Efficient neural network robustness certification with general activation functions, 2018",
    radius=bisection(crown_margins),
)
def crown(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True, chunk_boxes: Count = 64
) -> CertifyResult:
    """Certified if the linear lower bound of every margin is above zero; `chunk_boxes` in memory, for patches."""
    decided = partial(decided_margins, slopes="adaptive", hidden=True)
    return certify_margins(model, x, y, threat, "crown", decided, sound=sound, chunk=chunk_boxes)


@Certificate(
    "crown-ibp",
    summary="intervals for the hidden layers, linear bounds for the margins",
    threats=REGIONS,
    reference="Zhang et al., Towards stable and efficient training of verifiably robust neural networks, 2020",
    radius=bisection(crown_ibp_margins),
)
def crown_ibp(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True, chunk_boxes: Count = 256
) -> CertifyResult:
    """One backward pass on interval bounds of the hidden layers."""
    decided = partial(decided_margins, slopes="adaptive", hidden=False)
    return certify_margins(model, x, y, threat, "crown-ibp", decided, sound=sound, chunk=chunk_boxes)
