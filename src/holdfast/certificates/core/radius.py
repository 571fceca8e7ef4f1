"""The largest radius that can be proved: a search over the budget, for every input of a batch at once.

Plain bisection asks yes or no. With `pec` a failed try at eps still proves some radius below eps, which lifts the lower
end of the bracket, so that fewer bounds have to be computed (Liu et al., "Training provably robust models by polyhedral
envelope regularization", 2020, algorithm 2). It also says by how much it failed, so that the next try can aim at the
radius where the margin vanishes: the ITP method of Oliveira and Takahashi ("An enhancement of the bisection method
average performance preserving minmax optimality", 2020), which needs at most one try more than bisection, and usually
far fewer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from holdfast.bounding.core.region import Region, balls
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear.relax import Slopes
from holdfast.certificates.core.distance import NORMS, Norm
from holdfast.certificates.core.margins import from_margins, interval_margins, linear_margins
from holdfast.certificates.models.smoothed import Smoothed, unwrap
from holdfast.certificates.pec import Ball, Envelope, envelope
from holdfast.checks import check_precision, check_task
from holdfast.errors import InputError, did_you_mean
from holdfast.registry import get
from holdfast.threats import L1, L2, Linf

Method = Literal["pec", "kw", "fastlin", "crown", "crown-ibp", "ibp", "gloro", "lipschitz"]
METHODS: tuple[Method, ...] = get_args(Method)
CLOSED = ("gloro", "lipschitz")
"""Methods that give the radius itself, without a search; for l2."""
Sampled = Literal["smoothing"]
SAMPLED: tuple[Sampled, ...] = get_args(Sampled)
"""Methods whose radius is that of a smoothed classifier, from samples; for l2."""

Proof = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""From some inputs, their labels and a radius to try (B,) to the radius proved (B,), at most the one tried, and the
smallest margin over the ball that was tried (B,), if it may guide the search."""


@dataclass(frozen=True, eq=False)
class RadiusSearch:
    """What a search found.

    Attributes:
        radius: (B,) the largest radius that was proved; 0 where the input is misclassified.
        estimate: (B,) middle of the last bracket: nearer to the method's limit, and *not* proved.
        evaluations: (B,) int64, how often bounds were computed for each input.
    """

    radius: Tensor
    estimate: Tensor
    evaluations: Tensor


@torch.no_grad()
def radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: Norm,
    method: Method | Sampled = "pec",
    *,
    eps_max: float | None = None,
    tolerance: float = 1e-4,
    slopes: Slopes = "parallel",
    low: float = 0.0,
    high: float = 1.0,
    sound: bool = True,
    chunk: int = 256,
    **options: Any,
) -> Tensor:
    """Largest radius of a ball around each input in which the class is proved not to change, (B,).

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
        slopes: of `pec`: "parallel" (Fast-Lin) or "adaptive" (CROWN).
        low, high: the valid range of every input value.
        sound: account for floating-point rounding.
        chunk: inputs worked on at a time; memory grows with it, the answer does not change.
        **options: of "smoothing": sigma, n, n0, alpha, batch, seed.

    Example:
        >>> model = torch.nn.Linear(2, 2).eval()
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x, y = torch.tensor([[0.8, 0.2], [0.2, 0.8]]), torch.tensor([0, 0])
        >>> [round(r, 3) for r in radius(model, x, y, "linf").tolist()]
        [0.3, 0.0]
    """
    found = search_radius(
        model,
        x,
        y,
        norm,
        method,
        eps_max=eps_max,
        tolerance=tolerance,
        slopes=slopes,
        low=low,
        high=high,
        sound=sound,
        chunk=chunk,
        **options,
    )
    return found.radius


@torch.no_grad()
def search_radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: Norm,
    method: Method | Sampled = "pec",
    *,
    eps_max: float | None = None,
    tolerance: float = 1e-4,
    slopes: Slopes = "parallel",
    low: float = 0.0,
    high: float = 1.0,
    sound: bool = True,
    chunk: int = 256,
    **options: Any,
) -> RadiusSearch:
    """The search behind `radius`, with its cost; same arguments."""
    if norm not in NORMS:
        raise InputError(f"unknown norm '{norm}' for a radius. " + did_you_mean(str(norm), NORMS))
    if method not in (*METHODS, *SAMPLED):
        known = (*METHODS, *SAMPLED)
        raise InputError(f"unknown method '{method}' for a radius. " + did_you_mean(str(method), known))
    if chunk < 1:
        raise InputError(f"chunk must be at least 1, got {chunk}")
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise InputError(f"tolerance must be a positive number, got {tolerance}")
    if options and method not in SAMPLED:
        raise InputError(f"method '{method}' has no option '{next(iter(options))}' for a radius")
    threat = _ball(norm, low, high)
    if isinstance(model, Smoothed):
        model, options = unwrap(model, method, options)
    check_precision(x)
    logits = check_task(model, x, y, threat, chunk=chunk)
    right = logits.argmax(1) == y
    top = _diameter(x, threat) if eps_max is None else eps_max
    if not (math.isfinite(top) and top > 0):
        raise InputError(f"eps_max must be a positive number, got {eps_max}")
    if method in CLOSED:
        get("certify", method).check(threat, {})
        known = get("certify", method).function(model, x, y, threat, sound=sound, logits=logits).radius
        found = torch.where(right, known.clamp(max=top), 0.0)
        return RadiusSearch(found, found, torch.ones_like(y))
    if method in SAMPLED:
        entry = get("certify", method)
        entry.check(threat, options)
        # No radius is asked for, so nothing is settled before the last sample.
        proved = entry.function(model, x, y, threat, logits=logits, **{"adaptive": False} | options).radius
        found = proved.clamp(max=top)
        return RadiusSearch(found, found, torch.ones_like(y))
    prove = _prover(trace(model, x, threat), threat, cast(Method, method), slopes, sound)
    parts = [
        _search(prove, x[i : i + chunk], y[i : i + chunk], right[i : i + chunk], top, tolerance)
        for i in range(0, len(x), chunk)
    ]
    return RadiusSearch(
        torch.cat([part.radius for part in parts]),
        torch.cat([part.estimate for part in parts]),
        torch.cat([part.evaluations for part in parts]),
    )


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


def _prover(graph: Graph, threat: Ball, method: Method, slopes: Slopes, sound: bool) -> Proof:
    if method == "pec":
        options = Envelope(slopes=slopes, sound=sound)

        def prove_envelope(x: Tensor, y: Tensor, eps: Tensor) -> tuple[Tensor, Tensor | None]:
            proved, found = envelope(graph, x, y, threat, eps, options)
            return proved, from_margins(found, y, method).margin

        return prove_envelope

    def margins(r: Region, y: Tensor) -> Tensor:
        if method == "ibp":
            return interval_margins(graph, r, y, sound=sound)
        lines: Slopes = "parallel" if method in ("kw", "fastlin") else "adaptive"
        return linear_margins(graph, r, y, slopes=lines, hidden=method != "crown-ibp", sound=sound)

    def prove(x: Tensor, y: Tensor, eps: Tensor) -> tuple[Tensor, Tensor | None]:
        certified = from_margins(margins(balls(threat, x, eps, sound=sound), y), y, method).certified
        return torch.where(certified, eps, torch.zeros_like(eps)), None

    return prove


@dataclass(frozen=True, eq=False)
class _Secant:
    """The last radius proved as a whole and the last one that failed, each with its margin; (B,) each."""

    low: Tensor
    low_margin: Tensor
    high: Tensor
    high_margin: Tensor

    @property
    def root(self) -> Tensor:
        """Where the line through both points is zero; NaN as long as one of them is missing."""
        return self.low + (self.high - self.low) * self.low_margin / (self.low_margin - self.high_margin)


def _search(prove: Proof, x: Tensor, y: Tensor, right: Tensor, eps_max: float, tolerance: float) -> RadiusSearch:
    """A bracket whose lower end also rises on failure; inputs leave as their brackets close."""
    proved = x.new_zeros(len(x))
    limit = torch.where(right, eps_max, 0.0).to(x)
    evaluations = torch.zeros_like(y)
    nan = torch.full_like(proved, torch.nan)
    secant = _Secant(nan, nan.clone(), nan.clone(), nan.clone())
    halvings = max(0, math.ceil(math.log2(eps_max / tolerance)))
    while True:
        # A bracket of two neighbouring floats cannot be halved, however small the tolerance.
        middle = (proved + limit) / 2
        active = ((limit - proved > tolerance) & (middle > proved) & (middle < limit)).nonzero()[:, 0]
        if len(active) == 0:
            return RadiusSearch(proved, middle, evaluations)
        tried = _next(proved, limit, secant.root, evaluations, halvings, tolerance)[active]
        found, margin = prove(x[active], y[active], tried)
        evaluations[active] += 1
        proved[active] = torch.maximum(proved[active], found)
        limit[active] = torch.where(found < tried, tried, limit[active])
        if margin is not None:
            whole = found >= tried
            for good, place, value in (
                (whole, secant.low, secant.low_margin),
                (~whole, secant.high, secant.high_margin),
            ):
                place[active[good]] = tried[good]
                value[active[good]] = margin[good]


def _next(proved: Tensor, limit: Tensor, root: Tensor, evaluations: Tensor, halvings: int, tolerance: float) -> Tensor:
    """The next radius to try (B,): the middle of the bracket, moved towards `root` as far as bisection can afford.

    After j tries bisection leaves a bracket of tolerance * 2^(halvings - j); ours may be twice as wide and no wider.
    """
    middle, width = (proved + limit) / 2, limit - proved
    aim = torch.where(root.isfinite(), root.clamp(proved, limit), middle)
    # A step past the root, towards the middle, so that both ends of the bracket move.
    shift = (0.2 * width.square() / (proved + limit).clamp(min=tolerance)).clamp(min=tolerance / 4)
    towards = (middle - aim).sign()
    aim = torch.where((middle - aim).abs() > shift, aim + towards * shift, middle)
    spare = (tolerance * 2.0 ** (halvings - evaluations) - width / 2).clamp(min=0)
    return torch.minimum(torch.maximum(aim, middle - spare), middle + spare)
