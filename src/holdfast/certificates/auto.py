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
from holdfast.certificates.core.hidden_values import hidden_values
from holdfast.certificates.crown import crown_ibp
from holdfast.certificates.gloro import gloro
from holdfast.certificates.ibp import ibp
from holdfast.certificates.patch import patch
from holdfast.errors import OutOfTime, UnsupportedError
from holdfast.registry import Certificate, get
from holdfast.results import CertifyResult
from holdfast.threats import L2, Box, PatchShape, Threat
from holdfast.utils import clock
from holdfast.utils.options import NotNegative

HOPE = 0.5
"""Of the clean margin: where CROWN falls short by more, alpha-CROWN is not tried."""
LARGEST = 20_000
"""Hidden values of a network up to which a complete search can end."""
FEW = 12
"""Input values up to which splitting inputs pays."""
SMALL = 500
"""Hidden values up to which a mixed-integer program ends in seconds."""


@Certificate(
    "auto",
    summary="runs the certificates that fit the threat, from cheap to tight, on what is still undecided",
    threats=(*REGIONS, "patch-shape"),
    reference="Holdfast",
)
def auto(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    tight: bool = True,
    time_limit: NotNegative = 1.0,
    sound: bool = True,
    logits: Tensor | None = None,
) -> CertifyResult:
    """Intervals, CROWN-IBP, alpha-CROWN, then a complete search, each on the inputs that those before it left open.

    On l2 balls Lipschitz constants come first, which cost one forward pass, then balls and boxes; a network that has no
    constants goes on without them. Before the last and costly step, a short attack takes out the inputs for which there
    is nothing to prove. A layer that only intervals cover, or a deadline, ends the climb; what was proved stands. What
    alpha-CROWN leaves open gets `input-split` if the inputs have few values, `beta-crown`, and `milp` if the network is
    small, the inputs with the smallest gap to a proof first. `x_adv` has the counter-examples, also of the attack.
    Shapes of patches get `patch`, which is all there is for them.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: what the adversary may do.
        tight: False leaves out alpha-CROWN and the complete search, which take most of the time.
        time_limit: seconds that each complete method has for each input that is still open; 0 leaves them out.
        sound: account for floating-point rounding.
        logits: (B, K), what the model returned for x, if they are at hand.
    """
    if isinstance(threat, PatchShape):
        return patch(model, x, y, threat, sound=sound)
    logits = model(x) if logits is None else logits
    right = logits.argmax(1) == y
    best = _by_constants(model, x, y, threat, logits, sound=sound) if isinstance(threat, L2) else _nothing(x)
    left = (~best.certified).nonzero()[:, 0]
    if len(left):  # also for inputs that are wrong: their margins are worth knowing
        best = _merge(x, best, ibp(model, x[left], y[left], threat.select(left), sound=sound), left)
    open_ = right & ~best.certified
    for step in (crown_ibp, alpha_crown) if tight else (crown_ibp,):
        if step is alpha_crown and threat.name in BALLS and not (isinstance(threat, Box) and threat.batched):
            left = open_.nonzero()[:, 0]
            best = _merge(x, best, _attacked(model, x[left], y[left], threat), left)
            open_ &= torch.tensor([not decided for decided in best.by], device=x.device)
        left = open_.nonzero()[:, 0]
        if len(left) == 0:
            break
        try:
            how: dict[str, Any] = {"ascent": Ascent(hope=HOPE)} if step is alpha_crown else {}
            found = step(model, x[left], y[left], threat.select(left), sound=sound, **how)
        except (UnsupportedError, OutOfTime):
            break
        best = _merge(x, best, found, left)
        open_ &= ~best.certified
    if tight and sound and time_limit > 0 and bool(open_.any()):
        best = _complete(model, x, y, threat, best, open_, time_limit)
    return best


def _complete(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, best: CertifyResult, open_: Tensor, time_limit: float
) -> CertifyResult:
    """Decide the inputs `open_` (B,) by the complete methods that fit, the most promising inputs first."""
    hidden = hidden_values(model, x[:1])
    pays = {"input-split": x[0].numel() <= FEW, "beta-crown": hidden <= LARGEST, "milp": hidden <= SMALL}
    for name in (name for name, does in pays.items() if does and threat.name in get("certify", name).threats):
        left = open_.nonzero()[:, 0]
        if len(left) == 0 or clock.over():
            break
        left = left[best.margin[left].argsort(descending=True, stable=True)]
        method = get("certify", name).function
        try:
            found = method(model, x[left], y[left], threat.select(left), time_limit=time_limit)
        except (UnsupportedError, OutOfTime):
            continue
        best = _merge(x, best, found, left)
        open_ = open_ & torch.tensor([not decided for decided in best.by], device=x.device)
    return best


def _attacked(model: nn.Module, x: Tensor, y: Tensor, threat: Threat) -> CertifyResult:
    """Nothing proved, and the counter-examples of a short attack."""
    found = pgd(model, x, y, threat, steps=10, loss="margin")
    x_adv = torch.where(found.success.view(-1, *[1] * (x.ndim - 1)), found.x_adv, x)
    return replace(_nothing(x), by=tuple("pgd" if lost else "" for lost in found.success.tolist()), x_adv=x_adv)


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
            best = _merge(x, best, step(model, x[left], y[left], threat, sound=sound, **chosen), left)
        except UnsupportedError:
            break
    return best


def _merge(x: Tensor, best: CertifyResult, found: CertifyResult, index: Tensor) -> CertifyResult:
    """The better margin of each input of x; `found` covers the inputs `index`."""
    margin, certified, by = best.margin.clone(), best.certified.clone(), list(best.by)
    better = found.margin > margin[index]
    margin[index] = margin[index].maximum(found.margin)
    certified[index] |= found.certified
    for i, name in zip(index.tolist(), found.by, strict=True):
        by[i] = by[i] or name
    place, rival = best.worst_place, best.worst_class
    if place is None or rival is None:  # the first certificate that looks at places sees all inputs
        place, rival = found.worst_place, found.worst_class
    elif found.worst_place is not None and found.worst_class is not None:
        place, rival, rows = place.clone(), rival.clone(), index[better]
        place[rows], rival[rows] = found.worst_place[better], found.worst_class[better]
    x_adv = best.x_adv
    if found.x_adv is not None:  # rows where one method found nothing are the inputs themselves
        x_adv = x.clone() if x_adv is None else x_adv.clone()
        x_adv[index] = found.x_adv
    told: dict[str, Any] = {"worst_place": place, "worst_class": rival, "x_adv": x_adv}
    return replace(best, margin=margin, certified=certified, by=tuple(by), **told)
