"""The convex outer polytope of Wong and Kolter: the whole ball is certified, or nothing."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from holdfast.bounding.core.region import BALLS
from holdfast.certificates.core.margins import certify_margins
from holdfast.certificates.core.radius_search import Ball, bisection
from holdfast.certificates.fastlin import fastlin_margins
from holdfast.registry import Certificate
from holdfast.results import CertifyResult


@Certificate(
    "kw",
    summary="the convex outer polytope: all of the ball or nothing; same bounds as fastlin",
    threats=BALLS,
    reference="Wong and Kolter, Provable defenses against adversarial examples via the convex outer adversarial "
    "polytope, 2018",
    radius=bisection(fastlin_margins),
)
def kw(model: nn.Module, x: Tensor, y: Tensor, threat: Ball, *, sound: bool = True) -> CertifyResult:
    """The baseline of `pec`: `radius` is eps where the whole ball is certified, else 0.

    For ReLU the dual bound of Wong and Kolter equals the Fast-Lin bound, which is computed.
    """
    found = certify_margins(model, x, y, threat, "kw", fastlin_margins, sound=sound)
    return replace(found, radius=torch.where(found.certified, threat.eps, 0.0).to(x))
