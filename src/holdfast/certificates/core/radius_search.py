"""Largest radius of each input: a search over the budget, for every input of a batch at once.

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
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding.core.region import balls
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear.relax import Slopes
from holdfast.certificates.core.margins import Margins, from_margins
from holdfast.registry import Certificate
from holdfast.threats import L1, L2, Linf

Ball = Linf | L2 | L1
Proof = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""From some inputs, their labels and a radius to try (B,) to the radius proved (B,), at most the one tried, and the
smallest margin over the ball that was tried (B,), if it may guide the search."""


@dataclass(frozen=True, eq=False)
class RadiusSearch:
    """What a search found."""

    radius: Tensor  # (B,) the largest radius that was proved; 0 where the input is misclassified
    estimate: Tensor  # (B,) middle of the last bracket: nearer to the method's limit, and *not* proved
    evaluations: Tensor  # (B,) int64, how often bounds were computed for each input
    broken: Tensor | None = None  # (B,) float64, size of the smallest counter-example met, infinite if none; or None

    def exact(self, tolerance: float) -> Tensor:
        """(B,) bool: whether a counter-example lies within `tolerance` above the radius that was proved."""
        if self.broken is None:
            return torch.zeros_like(self.radius, dtype=torch.bool)
        return self.broken - self.radius.double() <= tolerance


@dataclass(frozen=True, eq=False)
class Question:
    """A checked call of `hf.radius`; see there for what is not explained here."""

    model: nn.Module
    x: Tensor
    y: Tensor
    method: Certificate
    ball: Ball  # kind of ball and valid range, with radius 0
    logits: Tensor  # (B, K), what the model returned for x
    top: float  # largest radius to try
    tolerance: float
    slopes: Slopes
    sound: bool
    chunk: int

    @property
    def right(self) -> Tensor:
        """(B,) bool, where the model is right at the input itself."""
        return self.logits.argmax(1) == self.y


def own_radius(q: Question, **options: Any) -> RadiusSearch:
    """Take the radius that the certificate itself reports: a closed form, or one from samples."""
    # No budget is asked for, so sampling has nothing to settle before the last sample.
    given = {"sound": q.sound, "logits": q.logits, "adaptive": False}
    given = {name: value for name, value in given.items() if name in q.method.options}
    found = q.method.function(q.model, q.x, q.y, q.ball, **given | options).radius.clamp(max=q.top)
    found = found if q.method.smoothed else torch.where(q.right, found, 0.0)
    return RadiusSearch(found, found, torch.ones_like(q.y))


def searched(proof: Callable[[Graph, Question], Proof]) -> Callable[[Question], RadiusSearch]:
    """Make the search that tries radii with `proof(graph, question)`."""

    def search(q: Question) -> RadiusSearch:
        prove, right = proof(trace(q.model, q.x, q.ball), q), q.right
        pieces = [slice(i, i + q.chunk) for i in range(0, len(q.x), q.chunk)]
        parts = [bracket(prove, q.x[i], q.y[i], right[i], q.top, q.tolerance) for i in pieces]
        names = ("radius", "estimate", "evaluations")
        return RadiusSearch(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    return search


def bisection(margins: Margins) -> Callable[[Question], RadiusSearch]:
    """Make the search by yes or no: are all `margins` over the ball positive?"""

    def proof(graph: Graph, q: Question) -> Proof:
        def prove(x: Tensor, y: Tensor, eps: Tensor) -> tuple[Tensor, Tensor | None]:
            found = margins(graph, balls(q.ball, x, eps, sound=q.sound), y, sound=q.sound)
            return torch.where(from_margins(found, y, "").certified, eps, torch.zeros_like(eps)), None

        return prove

    return searched(proof)


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


def bracket(prove: Proof, x: Tensor, y: Tensor, right: Tensor, eps_max: float, tolerance: float) -> RadiusSearch:
    """A bracket whose lower end also rises on failure; inputs leave as their brackets close."""
    proved, limit = x.new_zeros(len(x)), torch.where(right, eps_max, 0.0).to(x)
    evaluations = torch.zeros_like(y)
    secant = _Secant(*(torch.full_like(proved, torch.nan) for _ in range(4)))
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
            low, high = active[whole], active[~whole]
            secant.low[low], secant.low_margin[low] = tried[whole], margin[whole]
            secant.high[high], secant.high_margin[high] = tried[~whole], margin[~whole]


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
