"""From cheap to tight: the costly certificates only see what is still undecided."""

from torch import Tensor, nn

from holdfast.bounds.inputs import BOXES
from holdfast.certify.ibp import ibp
from holdfast.registry import register
from holdfast.results import CertifyResult
from holdfast.threats import Threat


@register(
    "certify",
    "auto",
    summary="runs the certificates that fit the threat, from cheap to tight, on what is still undecided",
    guarantee="proof",
    threats=BOXES,
    reference="Holdfast",
)
def auto(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True) -> CertifyResult:
    """So far interval bounds alone.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: what the adversary may do.
        sound: account for floating-point rounding.
    """
    return ibp(model, x, y, threat, sound=sound)
