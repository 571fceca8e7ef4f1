"""From cheap to tight: the costly certificates only see what is still undecided."""

from dataclasses import replace

from torch import Tensor, nn

from holdfast.attacks.pgd import BALLS, pgd
from holdfast.bounds.region import REGIONS
from holdfast.certify.alpha_crown import alpha_crown
from holdfast.certify.margins import crown_ibp, ibp
from holdfast.errors import UnsupportedError
from holdfast.registry import register
from holdfast.results import CertifyResult
from holdfast.threats import Box, Threat


@register(
    "certify",
    "auto",
    summary="runs the certificates that fit the threat, from cheap to tight, on what is still undecided",
    guarantee="proof",
    threats=REGIONS,
    reference="Holdfast",
)
def auto(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True) -> CertifyResult:
    """Intervals, then CROWN-IBP, then alpha-CROWN, each on the inputs that those before it left open.

    Before the last and costly step, a short attack takes out the inputs for which there is nothing to prove. A layer
    that only intervals cover ends the climb; what they proved stands.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: what the adversary may do.
        sound: account for floating-point rounding.
    """
    best = ibp(model, x, y, threat, sound=sound)
    open_ = (model(x).argmax(1) == y) & ~best.certified
    for step in (crown_ibp, alpha_crown):
        if step is alpha_crown and threat.name in BALLS and not (isinstance(threat, Box) and threat.batched):
            left = open_.nonzero()[:, 0]
            open_[left] = ~pgd(model, x[left], y[left], threat, steps=10, loss="margin").success
        left = open_.nonzero()[:, 0]
        if len(left) == 0:
            break
        try:
            found = step(model, x[left], y[left], threat.select(left), sound=sound)
        except UnsupportedError:
            break
        best = _merge(best, found, left)
        open_ &= ~best.certified
    return best


def _merge(best: CertifyResult, found: CertifyResult, index: Tensor) -> CertifyResult:
    """The better margin of each input; `found` covers the inputs `index`."""
    margin, certified, by = best.margin.clone(), best.certified.clone(), list(best.by)
    margin[index] = margin[index].maximum(found.margin)
    certified[index] |= found.certified
    for i, name in zip(index.tolist(), found.by, strict=True):
        by[i] = by[i] or name
    return replace(best, margin=margin, certified=certified, by=tuple(by))
