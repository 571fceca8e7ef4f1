"""FAB: walk along the decision boundary towards the input.

Each step linearises the boundary at x_t, projects both x_t and the input x onto it inside the pixel box, and goes to a
mean of the two projections, biased towards the one of x the closer that one is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.attacks.core.hyperplane import move_to_hyperplane
from holdfast.attacks.core.losses import likely_targets
from holdfast.attacks.core.minimum_norm import BALLS, Search, by_search, in_threat, line_search, norm_of, per_input
from holdfast.attacks.core.planes import nearest_plane, other_classes
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.utils.options import Count, Factor, Inside, Unit, Whole

MOST_CLASSES = 100
_REFERENCE = "Croce and Hein, Minimally distorted adversarial examples with a fast adaptive boundary attack, 2020"
_CACHED = 2**18  # values of one tensor in a step, of which a dozen should stay in the processor's cache
# Radius of a random start where no misclassified point is known yet, in units of the range: the paper's budgets.
_RADIUS = {"linf": 0.3, "l2": 1.0, "l1": 5.0}


@dataclass(frozen=True)
class Walk:
    """How a run goes: its steps, the largest weight of the step from x, the overshoot and the way back; see `fab`."""

    steps: int
    alpha_max: float = 0.1
    eta: float = 1.05
    beta: float = 0.9


def run_fab(model: nn.Module, search: Search, x_t: Tensor, classes: Tensor, walk: Walk) -> None:
    """One run from x_t (R, ...) on the inputs of `search`, towards the nearest boundary to one of `classes` (R, C).

    Departs from the paper: a misclassified x_t is linearised where it is, not after the backward step.
    """
    for _ in range(walk.steps):
        w, value, logits = nearest_plane(model, x_t, search.y, classes, search.norm)
        wrong = search.note(x_t, logits, gradients=classes.shape[1], queries=classes.shape[1])
        if search.over:
            return
        x_t, classes, w, value, wrong = search.leave(x_t, classes, w, value, wrong)
        b = (w * x_t).flatten(1).sum(1) - value
        # The plane at the misclassified point serves for the step from behind it too: it lies closer to the boundary
        # than the point that the backward step goes to, and saves the forward pass of a separate check.
        back = 1 - (1 - walk.beta) * wrong.to(x_t.dtype)
        x_t = search.x + per_input(back, x_t) * (x_t - search.x)
        rows = max(1, _CACHED // max(1, x_t[0].numel()))
        parts = zip(*(t.split(rows) for t in (search.x, x_t, w, b)), strict=True)
        x_t = torch.cat([_step(search, *part, walk=walk) for part in parts])
    search.note(x_t, model(x_t))


def _step(search: Search, x: Tensor, x_t: Tensor, w: Tensor, b: Tensor, *, walk: Walk) -> Tensor:
    """(1 - alpha) (x_t + eta d_t) + alpha (x + eta d), where d_t and d take x_t and x onto the plane <w, .> = b."""
    pair = torch.stack([x_t.flatten(1), x.flatten(1)])
    moves = move_to_hyperplane(pair, w.flatten(1), b, search.norm, search.low, search.high)
    d_t, d = moves.view(2, *x_t.shape)
    size_t, size = (norm_of(m, search.norm).clamp(min=1e-8) for m in (d_t, d))
    alpha = per_input((size_t / (size_t + size)).clamp(max=walk.alpha_max), x_t)
    return search.clip((1 - alpha) * (x_t + walk.eta * d_t) + alpha * (x + walk.eta * d))


def _start(search: Search, noise: Noise, restart: int) -> Tensor:
    """x itself for restart 0; later a random point, half as far as the closest one known."""
    if restart == 0:
        return search.x
    source, shape = noise[search.row].fork(restart), search.x.shape[1:]
    d = 2 * source.uniform(shape, search.x.dtype) - 1 if search.norm == "linf" else source.normal(shape, search.x.dtype)
    default = search.goal or _RADIUS[search.norm] * (search.high - search.low)
    radius = 0.5 * search.nearest.clamp(max=default)
    return search.clip(search.x + per_input(radius / norm_of(d, search.norm), d) * d)


@by_search
def fab_nearest(
    model: nn.Module,
    search: Search,
    *,
    steps: Count = 100,
    restarts: Count = 1,
    alpha_max: Unit = 0.1,
    eta: Factor = 1.05,
    beta: Inside = 0.9,
    n_search: Whole = 3,
) -> None:
    """Minimise the norm of the perturbation, each step towards the nearest of all K - 1 boundaries; up to 100 classes.

    It takes K - 1 gradients for each step: prefer `fab-t` with more than a few classes. No step size, and invariant
    to the scale of the logits, so it is not fooled by saturated losses.

    Args:
        steps: steps of each run.
        restarts: runs in all; the first one starts at x, the others at random points.
        alpha_max: largest weight of the step from x, against the step from x_t.
        eta: overshoot beyond the plane.
        beta: a misclassified x_t goes back to x + beta (x_t - x).
        n_search: steps of the final search on the segment to the closest point.
    """
    walk = Walk(steps, alpha_max, eta, beta)
    logits = model(search.x)
    if logits.shape[1] > MOST_CLASSES:
        raise InputError(
            f"'fab' takes one gradient for each class and step, and the model has {logits.shape[1]} classes, more "
            f"than {MOST_CLASSES}; use 'fab-t', which takes one gradient for each step and target"
        )
    search.note(search.x, logits)
    for restart in range(restarts):
        if search.start("fab"):
            classes = other_classes(search.y, logits.shape[1])
            run_fab(model, search, _start(search, search.noise, restart), classes, walk)
    line_search(model, search, steps=n_search, name="fab")


@by_search
def fab_t_nearest(
    model: nn.Module,
    search: Search,
    *,
    steps: Count = 100,
    restarts: Count = 1,
    targets: Count = 9,
    alpha_max: Unit = 0.1,
    eta: Factor = 1.05,
    beta: Inside = 0.9,
    n_search: Whole = 3,
) -> None:
    """Run FAB with one gradient for each step, towards the `targets` classes of highest clean logit in turn.

    The defaults are AutoAttack's; the other options are the same as for `fab`.
    """
    walk = Walk(steps, alpha_max, eta, beta)
    logits = model(search.x)
    search.note(search.x, logits)
    ranked = likely_targets(logits, search.y, targets)
    for rank in range(ranked.shape[1]):
        for restart in range(restarts):
            if search.start("fab-t"):
                x_t = _start(search, search.noise.fork(rank), restart)
                run_fab(model, search, x_t, ranked[search.row, rank, None], walk)
    line_search(model, search, steps=n_search, name="fab-t")


fab = Attack(
    "fab",
    summary="fast adaptive boundary attack: minimum norm, all class boundaries at each step",
    threats=tuple(BALLS),
    nearest=fab_nearest,
    reference=_REFERENCE,
)(in_threat("fab", fab_nearest))

fab_t = Attack(
    "fab-t",
    summary="targeted fast adaptive boundary attack: minimum norm, one run for each likely class",
    threats=tuple(BALLS),
    nearest=fab_t_nearest,
    reference=_REFERENCE,
)(in_threat("fab-t", fab_t_nearest))
