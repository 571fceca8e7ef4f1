"""The largest radius that can be proved: the front door of all the ways to find it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding.graph.once import trace_once
from holdfast.bounding.linear.relax import Slopes
from holdfast.certificates.core.distance import NORMS, Norm
from holdfast.certificates.core.radius_search import Ball, Question, RadiusSearch, own_radius
from holdfast.certificates.models.smoothed import Smoothed, unwrap
from holdfast.checks import check_precision, check_task
from holdfast.errors import InputError, did_you_mean
from holdfast.registry import Certificate, get, methods
from holdfast.threats import L1, L2, Linf
from holdfast.utils.options import Count, Positive, check_options, options_of


@torch.no_grad()
def radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: Norm,
    method: str = "pec",
    *,
    eps_max: Positive | None = None,
    tolerance: Positive = 1e-4,
    slopes: Slopes = "parallel",
    low: float = 0.0,
    high: float = 1.0,
    sound: bool = True,
    chunk: Count = 256,
    **options: Any,
) -> Tensor:
    """Find the largest radius of a ball around each input in which the class is proved not to change, (B,).

    The value returned is always one that was proved. It is not always the largest that the method can prove: the
    bounds need not get looser in step with the budget, so that a bracket may close on the wrong side.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs in [low, high], shape (B, ...).  y: labels, shape (B,), int64.
        norm: "linf", "l2" or "l1".
        method: "pec" is the fastest search; "kw", "fastlin", "crown", "crown-ibp" and "ibp" bisect; "gloro" and
            "lipschitz" have a closed form at l2, for networks with small Lipschitz constants; "smoothing" samples the
            smoothed classifier, and each radius is wrong with probability alpha at most.
        eps_max: largest radius to try; if None, the largest distance between two valid inputs.
        tolerance: width of the bracket at which the search stops.
        slopes: lines of `pec`: "parallel" (Fast-Lin) or "adaptive" (CROWN).
        low, high: the valid range of every input value.
        sound: account for floating-point rounding.
        chunk: inputs worked on at a time; memory grows with it, the answer does not change.
        **options: options of "smoothing": sigma, n, n0, alpha, batch, seed.

    Example:
        >>> model = torch.nn.Linear(2, 2).eval()
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x, y = torch.tensor([[0.8, 0.2], [0.2, 0.8]]), torch.tensor([0, 0])
        >>> [round(r, 3) for r in radius(model, x, y, "linf").tolist()]
        [0.3, 0.0]
    """
    own: dict[str, Any] = {"eps_max": eps_max, "tolerance": tolerance, "slopes": slopes, "sound": sound, "chunk": chunk}
    return search_radius(model, x, y, norm, method, low=low, high=high, **own, **options).radius


@torch.no_grad()
def search_radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: Norm,
    method: str = "pec",
    *,
    eps_max: Positive | None = None,
    tolerance: Positive = 1e-4,
    slopes: Slopes = "parallel",
    low: float = 0.0,
    high: float = 1.0,
    sound: bool = True,
    chunk: Count = 256,
    **options: Any,
) -> RadiusSearch:
    """The search behind `radius`, with its cost; same arguments."""
    if norm not in NORMS:
        raise InputError(f"unknown norm '{norm}' for a radius. " + did_you_mean(str(norm), NORMS))
    own = {"eps_max": eps_max, "tolerance": tolerance, "slopes": slopes, "sound": sound, "chunk": chunk}
    check_options(options_of(search_radius), own, "call of radius")
    entry, ball = _method(method), _ball(norm, low, high)
    entry.check(ball, {})
    if isinstance(model, Smoothed):
        model, options = unwrap(model, method, options)
    options = entry.check(None, options)
    if options and entry.radius is not own_radius:
        raise InputError(f"method '{method}' has no option '{next(iter(options))}' for a radius")
    check_precision(x)
    logits = check_task(model, x, y, ball, chunk=chunk)
    top = _diameter(x, ball) if eps_max is None else eps_max
    question = Question(model, x, y, entry, ball, logits, top, tolerance, slopes, sound, chunk)
    assert entry.radius is not None
    with trace_once(model, x, logits):
        found: RadiusSearch = entry.radius(question, **options)
    return found


def _method(name: str) -> Certificate:
    """The certificate of that name, if it finds radii."""
    known = [entry.name for entry in methods("certify") if entry.radius is not None]
    if name not in known:
        raise InputError(f"unknown method '{name}' for a radius. " + did_you_mean(str(name), known))
    return get("certify", name)


def _ball(norm: Norm, low: float, high: float) -> Ball:
    kinds: dict[Norm, type[Linf] | type[L2] | type[L1]] = {"linf": Linf, "l2": L2, "l1": L1}
    return kinds[norm](0.0, low=low, high=high)


def _diameter(x: Tensor, threat: Ball) -> float:
    """Largest distance between two valid inputs."""
    side, count = threat.high - threat.low, x[0].numel()
    match threat:
        case Linf():
            return side
        case L2():
            return side * math.sqrt(count)
        case L1():
            return side * count
