"""Prove that there is no adversarial example: one file per certificate, one front door."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding.graph.once import trace_once
from holdfast.certificates import (  # noqa: F401  (registers the methods)
    alpha_crown,
    auto,
    bcp,
    cap,
    centroid,
    crown,
    fastlin,
    gloro,
    ibp,
    kw,
    lipschitz,
    nonuniform,
    patch,
    pec,
    slope_step,
    sparse,
)
from holdfast.certificates.complete import beta_crown, input_split, milp  # noqa: F401
from holdfast.certificates.core.radius import radius
from holdfast.certificates.models.gloro import GloRo
from holdfast.certificates.models.smoothed import Smoothed, unwrap
from holdfast.certificates.smoothing import smoothing_l0, smoothing_l1, smoothing_patch  # noqa: F401
from holdfast.checks import check_model, check_precision, check_task
from holdfast.errors import SoundnessError
from holdfast.models.random.random_network import check_function
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
    check_model(model)
    check_function(model)
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
    result = CertifyResult(
        torch.cat([part.certified for part in parts]),
        torch.cat([part.margin for part in parts]),
        _joined([part.radius for part in parts]),
        max(part.alpha for part in parts),
        tuple(name for part in parts for name in part.by),
        _joined([part.worst_place for part in parts]),
        _joined([part.worst_class for part in parts]),
        _examples([part.x_adv for part in parts], [x[piece] for piece in pieces]),
        parts[0].seed,
    )
    if entry.smoothed:  # the smoothed classifier may be right where the model is wrong, and the other way round
        return result
    if options.get("sound", True) and not entry.own_margin:
        _check_margin(result.margin, logits, y, method)
    result = replace(result, certified=result.certified & (logits.argmax(1) == y))
    return result if result.x_adv is None else _replayed(model, x, y, threat, result, result.x_adv)


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """One tensor of all parts, or None if the method does not give it."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _examples(found: list[Tensor | None], inputs: list[Tensor]) -> Tensor | None:
    """The counter-examples of all parts, with the inputs themselves where a part has none; None if no part has any."""
    if all(part is None for part in found):
        return None
    return torch.cat([own if part is None else part for part, own in zip(found, inputs, strict=True)])


def _replayed(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, result: CertifyResult, x_adv: Tensor
) -> CertifyResult:
    """Only counter-examples that lie in the threat set and that the model itself misclassifies."""
    moved = (x_adv != x).flatten(1).any(1).nonzero()[:, 0]
    near = threat.select(moved)
    points = near.project(x_adv[moved], x[moved])
    wrong = (model(points).argmax(1) != y[moved]) & near.contains(points, x[moved]) if len(moved) else moved.bool()
    kept, broken = x.clone(), torch.zeros_like(result.certified)
    kept[moved[wrong]], broken[moved[wrong]] = points[wrong], True
    both = (broken & result.certified).nonzero()[:, 0].tolist()
    if both:
        raise SoundnessError(
            f"'{result.by[both[0]]}' certifies an input and finds a counter-example for it. "
            "This is a bug in Holdfast: please report it with the model."
        )
    known = (broken | result.certified).tolist()
    by = tuple(name if decided else "" for name, decided in zip(result.by, known, strict=True))
    return replace(result, x_adv=kept, by=by)


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
