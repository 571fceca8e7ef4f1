"""The largest radius that can be proved: the front door of all the ways to find it."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.minimum_norm import BALLS
from holdfast.bounding.graph.once import trace_once
from holdfast.bounding.linear.relax import Slopes
from holdfast.certificates.core.distance import NORMS, Norm
from holdfast.certificates.core.radius_search import Ball, Question, RadiusSearch
from holdfast.certificates.models.smoothed import Smoothed, unwrap
from holdfast.checks import check_precision, check_task
from holdfast.errors import InputError, did_you_mean
from holdfast.registry import Certificate, get, methods
from holdfast.threats import L2, Linf
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
        method: "pec" is the fastest search; "kw", "fastlin", "crown", "crown-ibp" and "ibp" bisect; "beta-crown" finds
            the exact radius, given time; "gloro" and "lipschitz" have a closed form at l2, for networks with small
            Lipschitz constants; "smoothing" samples the smoothed classifier, and each radius is wrong with probability
            alpha at most.
        eps_max: largest radius to try; if None, the largest distance between two valid inputs.
        tolerance: width of the bracket at which the search stops.
        slopes: lines of `pec`: "parallel" (Fast-Lin) or "adaptive" (CROWN).
        low, high: the valid range of every input value.
        sound: account for floating-point rounding.
        chunk: inputs worked on at a time; memory grows with it, the answer does not change.
        **options: options of "smoothing": sigma, n, n0, alpha, batch, seed; of "beta-crown": time_limit, in seconds for
            each input over all radii, and width.

    Example:
        >>> model = torch.nn.Linear(2, 2).eval()
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x, y = torch.tensor([[0.8, 0.2], [0.2, 0.8]]), torch.tensor([0, 0])
        >>> [round(r, 3) for r in radius(model, x, y, "linf").tolist()]
        [0.3, 0.0]
    """
    own = {"eps_max": eps_max, "tolerance": tolerance, "slopes": slopes, "low": low, "high": high}
    return search_radius(model, x, y, norm, method, **own, sound=sound, chunk=chunk, **options).radius


@torch.no_grad()
def search_radius(
    model: nn.Module, x: Tensor, y: Tensor, norm: Norm, method: str = "pec", **options: Any
) -> RadiusSearch:
    """The search behind `radius`, with its cost; same arguments."""
    if norm not in NORMS:
        raise InputError(f"unknown norm '{norm}' for a radius. " + did_you_mean(str(norm), NORMS))
    known = options_of(radius)
    given = {name: options.pop(name, option.default) for name, option in known.items()}
    own = check_options(known, given, "call of radius")
    entry, ball = radius_method(method), BALLS[norm](0.0, low=own["low"], high=own["high"])
    entry.check(ball, {})
    if isinstance(model, Smoothed):
        model, options = unwrap(model, method, options)
    options = entry.check(None, options)
    assert entry.radius is not None
    if options and len(inspect.signature(entry.radius).parameters) == 1:
        raise InputError(f"method '{method}' has no option '{next(iter(options))}' for a radius")
    check_precision(x)
    logits = check_task(model, x, y, ball, chunk=own["chunk"])
    top = _diameter(x, ball) if own["eps_max"] is None else own["eps_max"]
    how = (own[name] for name in ("tolerance", "slopes", "sound", "chunk"))
    question = Question(model, x, y, entry, ball, logits, top, *how)
    with trace_once(model, x, logits):
        found: RadiusSearch = entry.radius(question, **options)
    return found


def radius_method(name: str) -> Certificate:
    """The certificate of that name, if it finds radii."""
    known = [entry.name for entry in methods("certify") if entry.radius is not None]
    if name not in known:
        raise InputError(f"unknown method '{name}' for a radius. " + did_you_mean(str(name), known))
    return get("certify", name)


def _diameter(x: Tensor, threat: Ball) -> float:
    """Largest distance between two valid inputs."""
    side, count = threat.high - threat.low, x[0].numel()
    if isinstance(threat, L2):
        return side * math.sqrt(count)
    return side if isinstance(threat, Linf) else side * count
