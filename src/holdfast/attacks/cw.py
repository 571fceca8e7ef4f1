"""Carlini and Wagner: the norm plus c times a hinge on the margin, minimised by Adam, with a search for c.

With the constant steps of the paper the distance depends on how the step size compares with the distance: Adam's first
steps have the same length in all values, and larger ones overshoot. Here steps shrink with the distance found, and x
is projected onto the boundary last; `relative=None, polish=0` leaves both out.
"""

from functools import partial

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import input_gradient
from holdfast.attacks.core.losses import margin
from holdfast.attacks.core.minimum_norm import Search, by_search, check_handled, in_threat, line_search, per_input
from holdfast.attacks.core.planes import project_closest
from holdfast.registry import Attack
from holdfast.utils.options import Count, NotNegative, Positive, Whole

NORMS = ("linf", "l2")
SEGMENT = 6
"""Points tried on the segment from x to the closest point before the boundary is linearised there."""


def _adam(gradient: Tensor, m: Tensor, v: Tensor, step: int, lr: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's move and its two moments (Kingma and Ba, 2015), after `step` earlier steps."""
    m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient.square()
    move = lr * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    return -move, m, v


def _hinge(model: nn.Module, search: Search, x_adv: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    """Gradient of f = max(z_y - max_{j != y} z_j, -kappa) at x_adv, and whether f has reached -kappa, (R,) bool."""
    gradient, value, logits = input_gradient(model, x_adv, search.y, margin)
    search.note(x_adv, logits, gradients=1)
    reached = (value > 0) & (value >= kappa)
    return torch.where(per_input(reached, x_adv), 0, -gradient), reached


def _step_size(search: Search, way: Tensor, lr: float, relative: float | None) -> Tensor:
    """Adam's step for each input of the run, (R, 1, ...): `lr`, at most the share `relative` of the way it has to go.

    Args:
        way: from x to the closest point, in Adam's variable, (R, ...); used where a point was found.
    """
    size = search.nearest.new_full((len(way),), lr)
    if relative is not None:
        size = torch.where(
            torch.isfinite(search.nearest), (relative * way.flatten(1).abs().amax(1)).clamp(max=lr), size
        )
    return per_input(size, way)


def _round_l2(
    model: nn.Module, search: Search, c: Tensor, *, steps: int, lr: float, relative: float | None, kappa: float
) -> Tensor:
    """Minimises |x_adv - x|_2^2 + c f over u, where x_adv = middle + half tanh(u); (B,) bool: did f reach -kappa?"""
    middle, half = (search.high + search.low) / 2, (search.high - search.low) / 2

    def variable(x: Tensor) -> Tensor:
        return torch.atanh((x - middle) / half * (1 - 1e-6))  # pixels at the very ends of the range have no finite u

    u = variable(search.x)
    size = _step_size(search, variable(search.x_adv[search.row]) - u, lr, relative)
    m, v, c = torch.zeros_like(u), torch.zeros_like(u), c[search.row]
    reached = torch.zeros(len(search.all_x), dtype=torch.bool, device=u.device)
    for step in range(steps):
        t = torch.tanh(u)
        x_adv = search.clip(middle + half * t)
        slope, hit = _hinge(model, search, x_adv, kappa)
        reached[search.row] |= hit
        gradient = (2 * (x_adv - search.x) + per_input(c, u) * slope) * half * (1 - t.square())
        move, m, v = _adam(gradient, m, v, step, size)
        u, m, v, c, size = search.leave(u + move, m, v, c, size)
        if search.over:
            break
    return reached


def _round_linf(
    model: nn.Module, search: Search, c: Tensor, *, steps: int, lr: float, relative: float | None, kappa: float
) -> Tensor:
    """Minimises c f + sum_i max(|d_i| - tau, 0) over d, from the closest point on; (B,) bool: did f reach -kappa?

    The penalty bears on all values that are too large, not only on the largest. tau is 0.9 of the closest distance,
    and so shrinks with each success.
    """
    x_adv, c = search.x_adv[search.row], c[search.row]
    size = _step_size(search, x_adv - search.x, lr, relative)
    m, v = torch.zeros_like(x_adv), torch.zeros_like(x_adv)
    reached = torch.zeros(len(search.all_x), dtype=torch.bool, device=x_adv.device)
    for step in range(steps):
        slope, hit = _hinge(model, search, x_adv, kappa)
        reached[search.row] |= hit
        tau = 0.9 * search.nearest.clamp(max=search.high - search.low)
        d = x_adv - search.x
        gradient = per_input(c, d) * slope + d.sign() * (d.abs() > per_input(tau, d))
        move, m, v = _adam(gradient, m, v, step, size)
        x_adv, m, v, c, size = search.leave(search.clip(x_adv + move), m, v, c, size)
        if search.over:
            break
    return reached


@by_search
def cw_nearest(
    model: nn.Module,
    search: Search,
    *,
    steps: Count = 100,
    lr: Positive = 0.1,
    relative: Positive | None = 0.1,
    rounds: Count = 9,
    c: Positive = 1e-3,
    kappa: NotNegative = 0.0,
    polish: Whole = 2,
    targets: Count = 4,
) -> None:
    """Minimise norm + c max(z_y - max_{j != y} z_j, -kappa); each input has a c of its own.

    L2: in the variable u of x_adv = middle + half tanh(u), with c grown tenfold until it succeeds, then bisected.
    Linf: the norm is sum_i max(|d_i| - tau, 0), where tau shrinks with each success; c grows while nothing is found.
    Slow: steps * rounds gradients and a few more. `fmn` and `fab` find close points for less.
    The attack of the paper, as it is used most: lr=0.01, relative=None, polish=0.

    Args:
        steps: steps of Adam in each round.
        lr: Adam's step size, in the variable u for L2 and in the input's unit for Linf.
        relative: once a point is known, steps are at most this share of the largest value of its move. None: no limit.
        rounds: values of c that are tried.
        c: the first of them.
        kappa: margin that is aimed at; the closest misclassified point is kept whatever its margin.
        polish: rounds that project x onto the boundary as linearised at the closest point. 0: none.
        targets: classes whose boundaries such a round tries, one gradient for each.
    """
    check_handled(search.norm, "cw", NORMS)
    weight = torch.full_like(search.distance, c)
    lower, upper = torch.zeros_like(weight), torch.full_like(weight, torch.inf)
    run = partial(_round_l2 if search.norm == "l2" else _round_linf, steps=steps, lr=lr, relative=relative, kappa=kappa)
    search.note(search.x, model(search.x))
    for _ in range(rounds):
        before = search.distance.clone()
        if not search.start("cw"):
            break
        reached = run(model, search, weight)
        if search.norm == "l2":
            lower, upper = torch.where(reached, lower, weight), torch.where(reached, weight, upper)
            if relative is not None:
                # A weight that was enough for longer steps, which overshoot, need not be for shorter ones.
                upper = torch.where(reached, upper, 2 * upper)
            weight = torch.where(torch.isinf(upper), 10 * weight, (lower + upper) / 2)
        else:
            # A weight that is large enough serves every tau; it grows while nothing closer turns up.
            weight = torch.where(reached & (search.distance < before), weight, 10 * weight)
    if polish > 0:
        line_search(model, search, steps=SEGMENT, name="cw")
        project_closest(model, search, rounds=polish, targets=targets, name="cw")


cw = Attack(
    "cw",
    summary="norm plus c times a hinge on the margin, minimised by Adam, with a search for c",
    threats=NORMS,
    nearest=cw_nearest,
    reference="Carlini and Wagner, Towards evaluating the robustness of neural networks, 2017",
)(in_threat("cw", cw_nearest))
