"""Margins against the Lipschitz constant of the network, for all inputs or around each of them."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from holdfast.bounding.ball_box.margin import proven_norm
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.local import local_lipschitz
from holdfast.certificates.core.lipschitz_margins import (
    NORMS,
    certify_by_constants,
    certify_logits,
    lipschitz_constants,
    round_down,
)
from holdfast.certificates.core.proved_norms import cached_norm
from holdfast.certificates.core.radius_search import own_radius
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import L2


@Certificate(
    "lipschitz",
    summary="margins against sqrt(2) times the Lipschitz constant of the network, the same for all pairs of classes",
    threats=NORMS,
    reference="Tsuzuku, Sato and Sugiyama, Lipschitz-margin training: scalable certification of perturbation "
    "invariance for deep neural networks, 2018",
    radius=own_radius,
)
def lipschitz(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: L2,
    *,
    local: bool = False,
    sound: bool = True,
    logits: Tensor | None = None,
) -> CertifyResult:
    """Certified if z_y - z_i > sqrt(2) eps K for all i; never more than `gloro` proves, unless local.

    With `local`, constants for every pair of classes that hold in the ball around each input, where neurons that stay
    off do not count (bounding/lipschitz/local.py): never less than `gloro` proves, by a proof of norms for each input.
    """
    if local:
        return _certify_locally(model, x, y, threat, sound=sound, logits=logits)
    return certify_by_constants(model, x, y, threat, "lipschitz", single=True, sound=sound, logits=logits)


def _certify_locally(
    model: nn.Module, x: Tensor, y: Tensor, threat: L2, *, sound: bool, logits: Tensor | None
) -> CertifyResult:
    constants, logits = lipschitz_constants(model, x, threat, sound=sound), model(x) if logits is None else logits
    ball = region(threat, x, sound=sound)
    around = local_lipschitz(trace(model, x, threat), ball, norm=proven_norm(cached_norm), sound=sound)
    pairs = torch.minimum(around.pairs(y), constants.pairs[y])
    found = certify_logits(logits, x, y, threat, constants, "lipschitz", sound=sound, pairs=pairs)
    everywhere = certify_logits(logits, x, y, threat, constants, "lipschitz", sound=sound)
    assert found.radius is not None
    assert everywhere.radius is not None
    # Beyond the ball only the global constants hold.
    within = found.radius.clamp(max=float(round_down(torch.tensor(threat.eps, dtype=torch.float64), x.dtype)))
    return replace(found, radius=torch.maximum(within, everywhere.radius))
