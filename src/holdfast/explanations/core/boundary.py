"""The nearest decision boundary of each input: an ensemble of attacks over budgets, the closest point, made exact.

An attack's point lies behind the boundary. Bisection puts it onto the boundary, and the projection of x onto the plane
that the boundary follows there pulls it to where it is nearest: exactly on a linear model, and on a ReLU network if
the point has come to the right piece of the boundary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import ascend
from holdfast.attacks.core.batches import concatenate
from holdfast.attacks.core.chance import is_stochastic
from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import cross_entropy, margin
from holdfast.attacks.core.minimum_norm import BALLS, Nearest, check_norm, norm_of, per_input
from holdfast.attacks.core.nearest import get_nearest, nearest_options
from holdfast.attacks.core.planes import BEYOND, move_onto_plane
from holdfast.errors import InputError
from holdfast.explanations.core.quantity import Setting
from holdfast.utils.options import Positive, Whole, check_fields, check_options

PUBLISHED_BUDGETS = (36 / 255, 64 / 255, 0.3, 0.5, 0.7, 0.9, 1.1)


@dataclass(frozen=True)
class BoundarySearch:
    """How the nearest boundary is looked for.

    Attributes:
        norm: measures the distance: "l2" or "linf".
        budgets: radii that projected gradient ascent tries, increasing, in the input's unit. What lies beyond the last
            one counts as not found.
        steps: steps of each ascent, which starts at x and moves by 2 * budget / steps; 0 to leave the ascents out.
        attacks: minimum-norm attacks that `hf.nearest` knows.
        options: options of the attacks, by name, where they differ from the defaults.
        starts: random points around x, within the distance known, from which projections look for other boundaries.
        refine: projections from each point; 0 leaves the attack's point as it is.
    """

    norm: str = "l2"
    budgets: tuple[Positive, ...] = (*PUBLISHED_BUDGETS, 2.2, 4.4, 8.8)
    steps: Whole = 20
    attacks: tuple[str, ...] = ("deepfool", "auto")
    starts: Whole = 10
    refine: Whole = 6
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if check_norm(self.norm) == "l1":
            raise InputError("a boundary search minimises 'l2' or 'linf', got 'l1'")
        check_fields(self)
        if not self.budgets or list(self.budgets) != sorted(set(self.budgets)):
            raise InputError(f"budgets must be increasing, at least one, got {self.budgets}")
        if self.steps == 0 and not self.attacks:
            raise InputError(f"a boundary search needs steps or an attack, got {self}")
        for attack in (*self.attacks, *self.options):
            check_options(nearest_options(attack), self.options.get(attack, {}), f"method '{attack}'")


PUBLISHED = BoundarySearch(
    budgets=PUBLISHED_BUDGETS,
    steps=100,
    attacks=("cw",),
    starts=0,
    refine=0,
    options={"cw": {"steps": 100, "lr": 1e-2, "relative": None, "polish": 0}},
)
"""The search of Wang, Fredrikson and Datta (2022) for standard models, with their step size of CW, 0.01.

They count points of CW up to a distance of 1.0, and points of the ascents up to 1.1; here both count up to 1.1.
"""


@torch.no_grad()
def nearest_boundary(model: nn.Module, x: Tensor, setting: Setting, search: BoundarySearch) -> Nearest:
    """The nearest point found that the model puts into another class than x; see `hf.Nearest`.

    The class is the one that the model predicts for x, right or wrong. Points beyond the largest budget count as not
    found: distance infinite, `x_adv` the input itself.

    Args:
        setting: range, random numbers and chunk.
    """
    if is_stochastic(model, x):
        raise InputError("the model draws random numbers, so it has no fixed boundary; use 'smoothgrad' or 'saliency'")
    rows = torch.arange(len(x), device=x.device).split(setting.chunk)
    with frozen(model):
        parts = [_one_chunk(model, x[r], setting.select(r), search) for r in rows]
    return concatenate(parts)


def _one_chunk(model: nn.Module, x: Tensor, setting: Setting, search: BoundarySearch) -> Nearest:
    y = model(x).argmax(1)
    known = Nearest(x.clone(), x.new_full((len(x),), torch.inf), ("",) * len(x), torch.zeros_like(y), 0 * y + 1)
    for attack in search.attacks:
        options = search.options.get(attack, {})
        found = get_nearest(attack)(model, x, y, search.norm, setting.low, setting.high, noise=setting.noise, **options)
        known = _closer(model, x, y, known, found, search.norm)
    if search.steps > 0:
        known = _closer(model, x, y, known, _ascents(model, x, y, known.distance, setting, search), search.norm)
    best, distance, gradients, queries = known.x_adv, known.distance, known.gradients, known.queries
    rows = torch.isfinite(distance).nonzero()[:, 0]
    if search.refine > 0 and len(rows) > 0:
        task = (model, x[rows], y[rows])
        best[rows] = refine(*task, explore(*task, best[rows], setting.select(rows), search), setting, search)
        distance[rows] = norm_of(best[rows] - x[rows], search.norm)
        gradients[rows] += search.refine * (search.starts + 1)
        queries[rows] += search.refine * (search.starts + 1 + len(BEYOND)) + 2 * HALVINGS
    inside = distance <= search.budgets[-1]
    by = tuple(name if kept else "" for name, kept in zip(known.by, inside.tolist(), strict=True))
    best = torch.where(per_input(inside, x), best, x)
    return Nearest(best, torch.where(inside, distance, torch.inf), by, gradients, queries)


def _closer(model: nn.Module, x: Tensor, y: Tensor, known: Nearest, found: Nearest, norm: str) -> Nearest:
    """The closer of two points for each input; what an attack found is looked at again.

    A point within rounding of the boundary may tip over in another batch.
    """
    wrong = model(found.x_adv).argmax(1) != y
    distance = norm_of(found.x_adv - x, norm)
    closer = wrong & (distance < known.distance)
    return Nearest(
        torch.where(per_input(closer, x), found.x_adv, known.x_adv),
        torch.where(closer, distance, known.distance),
        tuple(new if c else old for new, old, c in zip(found.by, known.by, closer.tolist(), strict=True)),
        known.gradients + found.gradients,
        known.queries + found.queries + 1,
    )


def _ascents(
    model: nn.Module, x: Tensor, y: Tensor, known: Tensor, setting: Setting, search: BoundarySearch
) -> Nearest:
    """Projected gradient ascent at each budget below the distance known, (B,), until one breaks the input."""
    x_adv, broken = x.clone(), torch.zeros_like(y, dtype=torch.bool)
    gradients, queries = torch.zeros_like(y), torch.zeros_like(y)
    for budget in search.budgets:
        rows = (~broken & (known > budget)).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        threat, size = BALLS[search.norm](budget, low=setting.low, high=setting.high), 2 * budget / search.steps
        task = (model, x[rows], y[rows], threat, x[rows])
        result = ascend(*task, loss=cross_entropy, steps=search.steps, step_size=size, name="pgd")
        x_adv[rows], broken[rows] = result.x_adv, result.success
        gradients[rows] += result.gradients
        queries[rows] += result.queries
    distance = torch.where(broken, norm_of(x_adv - x, search.norm), torch.inf)
    return Nearest(x_adv, distance, tuple("pgd" if hit else "" for hit in broken.tolist()), gradients, queries)


HALVINGS = 22
"""Of the segment from x to a point behind the boundary, which is then known to a share of 2^-22, 2e-7, of it."""


def _onto_boundary(
    model: nn.Module, x: Tensor, y: Tensor, p: Tensor, setting: Setting, norm: str
) -> tuple[Tensor, ...]:
    """The least move of x onto the boundary f_i = f_y as linearised at p, i the best other class there; p's logits."""
    w, f, logits = input_gradient(model, p, y, margin)
    return move_onto_plane(x, w, f, p, norm, setting.low, setting.high), logits


def explore(model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, setting: Setting, search: BoundarySearch) -> Tensor:
    """Points of another class, no farther from x than `x_adv`: repeated projections from random points around x.

    The nearest point of the plane at p is the next p, so that a run settles where the boundary is nearest to x among
    the pieces near its start.
    """
    best, distance = x_adv, norm_of(x_adv - x, search.norm)
    for k in range(search.starts):
        noise = setting.noise.fork(k)
        direction = noise.normal(x.shape[1:], x.dtype)
        length = distance * noise.fork(0).uniform((), x.dtype) / norm_of(direction, search.norm)
        p = (x + per_input(length, x) * direction).clamp(setting.low, setting.high)
        for _ in range(search.refine):
            move, logits = _onto_boundary(model, x, y, p, setting, search.norm)
            far = norm_of(p - x, search.norm)
            closer = (logits.argmax(1) != y) & (far < distance)
            best, distance = torch.where(per_input(closer, x), p, best), torch.where(closer, far, distance)
            p = (x + BEYOND[-1] * move).clamp(setting.low, setting.high)
    return best


def refine(model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, setting: Setting, search: BoundarySearch) -> Tensor:
    """Points of another class on the boundary, no farther from x than `x_adv`, shape of x.

    A round projects x onto the boundary as linearised at the point, and takes the projection if it is closer and of
    another class.

    Args:
        x_adv: points of another class, shape of x.  y: classes of x, (B,).
    """
    first = best = bisect(model, x, y, x_adv)
    reach = norm_of(first - x, search.norm)
    for _ in range(search.refine):
        move, _ = _onto_boundary(model, x, y, best, setting, search.norm)
        closer = norm_of(move, search.norm) < reach
        for beyond in BEYOND:
            trial = (x + beyond * move).clamp(setting.low, setting.high)
            better = closer & (model(trial).argmax(1) != y)
            best = torch.where(per_input(better, x), trial, best)
            reach = torch.where(better, norm_of(move, search.norm), reach)
            closer = closer & ~better
    best = bisect(model, x, y, best)
    closer = norm_of(best - x, search.norm) < norm_of(first - x, search.norm)
    return torch.where(per_input(closer, x), best, first)


def bisect(model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor) -> Tensor:
    """Where the segment from x to `x_adv` changes its class, from the side of `x_adv`; shape of x."""
    right, wrong, best = x.new_zeros(len(x)), x.new_ones(len(x)), x_adv
    for _ in range(HALVINGS):
        middle = (right + wrong) / 2
        point = x + per_input(middle, x) * (x_adv - x)
        off = model(point).argmax(1) != y
        best = torch.where(per_input(off, x), point, best)
        right, wrong = torch.where(off, right, middle), torch.where(off, middle, wrong)
    return best
