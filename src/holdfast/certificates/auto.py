"""From cheap to tight: the costly certificates only see what is still undecided."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.attacks.pgd import pgd
from holdfast.bounding.core.region import REGIONS
from holdfast.bounding.linear.alpha import Ascent
from holdfast.certificates.alpha_crown import alpha_crown
from holdfast.certificates.bcp import bcp
from holdfast.certificates.core.margins import crown_ibp, ibp
from holdfast.certificates.lipschitz import gloro
from holdfast.errors import UnsupportedError
from holdfast.registry import Certificate, register
from holdfast.results import CertifyResult
from holdfast.threats import L2, Box, Threat

HOPE = 0.5
"""Of the clean margin: where CROWN falls short by more, alpha-CROWN is not tried."""


@register(
    Certificate(
        "auto",
        summary="runs the certificates that fit the threat, from cheap to tight, on what is still undecided",
        threats=REGIONS,
        reference="Holdfast",
    )
)
def auto(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    tight: bool = True,
    sound: bool = True,
    logits: Tensor | None = None,
) -> CertifyResult:
    """Intervals, then CROWN-IBP, then alpha-CROWN, each on the inputs that those before it left open.

    On l2 balls Lipschitz constants come first, which cost one forward pass, then balls and boxes; a network that has no
    constants goes on without them. Before the last and costly step, a short attack takes out the inputs for which there
    is nothing to prove. A layer that only intervals cover ends the climb; what they proved stands.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: what the adversary may do.
        tight: False leaves out alpha-CROWN, which takes most of the time.
        sound: account for floating-point rounding.
        logits: (B, K), what the model returned for x, if they are at hand.
    """
    logits = model(x) if logits is None else logits
    right = logits.argmax(1) == y
    best = _by_constants(model, x, y, threat, logits, sound=sound) if isinstance(threat, L2) else _nothing(x)
    left = (~best.certified).nonzero()[:, 0]
    if len(left):  # also for inputs that are wrong: their margins are worth knowing
        best = _merge(best, ibp(model, x[left], y[left], threat.select(left), sound=sound), left)
    open_ = right & ~best.certified
    for step in (crown_ibp, alpha_crown) if tight else (crown_ibp,):
        if step is alpha_crown and threat.name in BALLS and not (isinstance(threat, Box) and threat.batched):
            left = open_.nonzero()[:, 0]
            open_[left] = ~pgd(model, x[left], y[left], threat, steps=10, loss="margin").success
        left = open_.nonzero()[:, 0]
        if len(left) == 0:
            break
        try:
            how: dict[str, Any] = {"ascent": Ascent(hope=HOPE)} if step is alpha_crown else {}
            found = step(model, x[left], y[left], threat.select(left), sound=sound, **how)
        except UnsupportedError:
            break
        best = _merge(best, found, left)
        open_ &= ~best.certified
    return best


def _nothing(x: Tensor) -> CertifyResult:
    """Nothing proved of x (B, ...) yet."""
    margin = x.new_full((len(x),), -torch.inf)
    return CertifyResult(margin > 0, margin, by=("",) * len(x))


def _by_constants(model: nn.Module, x: Tensor, y: Tensor, threat: L2, logits: Tensor, *, sound: bool) -> CertifyResult:
    """What Lipschitz constants prove: `gloro`, then `bcp` on what is left; nothing if a layer has none."""
    best = _nothing(x)
    for step, options in ((gloro, {"logits": logits}), (bcp, {})):
        left = ((logits.argmax(1) == y) & ~best.certified).nonzero()[:, 0]
        if len(left) == 0:
            break
        chosen = {name: value[left] for name, value in options.items()}
        try:
            best = _merge(best, step(model, x[left], y[left], threat, sound=sound, **chosen), left)
        except UnsupportedError:
            break
    return best


def _merge(best: CertifyResult, found: CertifyResult, index: Tensor) -> CertifyResult:
    """The better margin of each input; `found` covers the inputs `index`."""
    margin, certified, by = best.margin.clone(), best.certified.clone(), list(best.by)
    margin[index] = margin[index].maximum(found.margin)
    certified[index] |= found.certified
    for i, name in zip(index.tolist(), found.by, strict=True):
        by[i] = by[i] or name
    return replace(best, margin=margin, certified=certified, by=tuple(by))
