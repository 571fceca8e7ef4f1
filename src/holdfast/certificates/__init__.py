"""Prove that there is no adversarial example: one file per certificate, one front door."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding.graph.once import trace_once
from holdfast.certificates import alpha_crown as _alpha_crown  # noqa: F401  (registers the methods)
from holdfast.certificates import auto as _auto  # noqa: F401
from holdfast.certificates import bcp as _bcp  # noqa: F401
from holdfast.certificates import cap as _cap  # noqa: F401
from holdfast.certificates import centroid as _centroid  # noqa: F401
from holdfast.certificates import crown as _crown  # noqa: F401
from holdfast.certificates import fastlin as _fastlin  # noqa: F401
from holdfast.certificates import gloro as _gloro  # noqa: F401
from holdfast.certificates import ibp as _ibp  # noqa: F401
from holdfast.certificates import kw as _kw  # noqa: F401
from holdfast.certificates import lipschitz as _lipschitz  # noqa: F401
from holdfast.certificates import nonuniform as _nonuniform  # noqa: F401
from holdfast.certificates import patch as _patch  # noqa: F401
from holdfast.certificates import pec as _pec  # noqa: F401
from holdfast.certificates import slope_step as _slope_step  # noqa: F401
from holdfast.certificates import sparse as _sparse  # noqa: F401
from holdfast.certificates.complete import milp as _milp  # noqa: F401
from holdfast.certificates.core.radius import radius
from holdfast.certificates.models.gloro import GloRo
from holdfast.certificates.models.smoothed import Smoothed, unwrap
from holdfast.certificates.smoothing import smoothing as _smoothing  # noqa: F401
from holdfast.certificates.smoothing import smoothing_l0 as _smoothing_l0  # noqa: F401
from holdfast.certificates.smoothing import smoothing_l1 as _smoothing_l1  # noqa: F401
from holdfast.certificates.smoothing import smoothing_patch as _smoothing_patch  # noqa: F401
from holdfast.checks import check_precision, check_task
from holdfast.errors import SoundnessError
from holdfast.registry import get
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.utils.options import Count, check_options, options_of

__all__ = ["GloRo", "Smoothed", "certify", "prove", "radius"]


AT_ONCE = 4096
"""Inputs that a certificate takes at a time if it has little more to do than to compare logits."""


@torch.no_grad()
def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat | str,
    method: str = "auto",
    *,
    chunk: Count = 256,
    **options: Any,
) -> CertifyResult:
    """Try to prove that no input of the threat set changes the class from `y`.

    An input is certified only if its margin stays above zero after the rounding-error term; a misclassified input never
    is. A certificate by smoothing speaks of the smoothed classifier, such as `hf.Smoothed`, and is
    wrong with probability `alpha` at most where it samples.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs in the threat's valid range, shape (B, ...).  y: labels, shape (B,), int64.
        threat: what the adversary may do.
        method: a name from `hf.methods("certify")`; "auto" goes from cheap to tight.
        chunk: inputs worked on at a time; memory grows with it, the answer does not change.
        **options: options of the method; `sound=False` leaves out the rounding-error term.

    Example:
        >>> import holdfast as hf
        >>> model = torch.nn.Linear(2, 2).eval()
        >>> result = hf.certify(model, torch.rand(4, 2), torch.zeros(4, dtype=torch.long), hf.Linf(0.1))
        >>> bool((result.certified == (result.margin > 0)).all())
        True
    """
    entry = get("certify", method)
    threat = read_threat(threat)
    options = entry.check(threat, options)
    check_options(options_of(certify), {"chunk": chunk}, "call of certify")
    if isinstance(model, Smoothed):
        model, options = unwrap(model, method, options)
    check_precision(x)
    logits = check_task(model, x, y, threat, chunk=chunk)
    return prove(model, x, y, threat, method, logits, chunk=chunk, **options)


def prove(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    method: str,
    logits: Tensor,
    *,
    chunk: int = 256,
    **options: Any,
) -> CertifyResult:
    """`certify` for a task that was checked, and whose logits (B, K) are known."""
    check_precision(x)
    entry = get("certify", method)
    # What samples mixes the copies of all inputs in batches of its own.
    chunk = len(x) if entry.guarantee == "probabilistic proof" else max(chunk, AT_ONCE) if entry.quick else chunk
    pieces = [slice(i, i + chunk) for i in range(0, len(x), chunk)]

    def one(piece: slice) -> CertifyResult:
        part, answers = x[piece], logits[piece]
        # A certificate that costs no more than a forward pass is spared a second one.
        known = {"logits": answers} if "logits" in entry.options else {}
        with trace_once(model, part, answers):
            result: CertifyResult = entry.function(model, part, y[piece], threat.select(piece), **known | options)
        return result

    with trace_once(model):
        parts = [one(piece) for piece in pieces]
    radii = [part.radius for part in parts if part.radius is not None]
    result = CertifyResult(
        torch.cat([part.certified for part in parts]),
        torch.cat([part.margin for part in parts]),
        torch.cat(radii) if radii else None,
        max(part.alpha for part in parts),
        tuple(name for part in parts for name in part.by),
    )
    if entry.smoothed:  # the smoothed classifier may be right where the model is wrong, and the other way round
        return result
    if options.get("sound", True) and not entry.own_margin:
        _check_margin(result.margin, logits, y, method)
    return replace(result, certified=result.certified & (logits.argmax(1) == y))


def _check_margin(margin: Tensor, logits: Tensor, y: Tensor, method: str) -> None:
    """Refuse a proof that the model contradicts at the input itself, which lies in every threat set."""
    z, rows = logits.double(), y[:, None]
    clean = (z.gather(1, rows) - z.scatter(1, rows, -torch.inf).amax(1, keepdim=True))[:, 0]
    wrong = margin.double() > clean
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise SoundnessError(
            f"'{method}' proves a margin of {margin[i]:.6g} for an input at which the model has {clean[i]:.6g}. "
            "This is a bug in Holdfast: please report it with the model."
        )
