"""FMN and DDN: gradient steps of a given length, projected onto a ball that shrinks while x_t is misclassified."""

import math

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import cross_entropy, margin
from holdfast.attacks.core.minimum_norm import (
    BALLS,
    Nearest,
    Search,
    check_handled,
    dual_norm_of,
    norm_of,
    per_input,
    within,
)
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Threat, norm_2


def annealed(first: float, last: float, step: int, steps: int) -> float:
    """Cosine annealing from `first` at step 0 to `last` at the last step."""
    return last + (first - last) * (1 + math.cos(math.pi * step / max(1, steps - 1))) / 2


def shrink_to_ball(d: Tensor, radius: Tensor, norm: str) -> Tensor:
    """The point of the ball of each input's own radius (B,) that is nearest to d (Euclidean), shape of d.

    For L1 the nearest point is max(|d| - t, 0) with the threshold t that spends the radius, found by one sort (Duchi et
    al., "Efficient projections onto the l1-ball", 2008).
    """
    if norm == "linf":
        limit = per_input(radius, d)
        return torch.minimum(torch.maximum(d, -limit), limit)
    if norm == "l2":
        return d * per_input((radius / norm_2(d).clamp(min=1e-12)).clamp(max=1), d)
    size = d.flatten(1).abs()
    ordered = size.sort(1, descending=True).values
    count = torch.arange(1, size.shape[1] + 1, device=d.device, dtype=d.dtype)
    thresholds = (ordered.cumsum(1) - radius[:, None]) / count
    last = ((ordered > thresholds).sum(1, keepdim=True) - 1).clamp(min=0)
    t = torch.where(size.sum(1, keepdim=True) > radius[:, None], thresholds.gather(1, last), 0)
    return d.sign() * (size - t).clamp(min=0).view_as(d)


def unit(gradient: Tensor) -> Tensor:
    """The gradient with Euclidean norm one."""
    return gradient / per_input(norm_2(gradient).clamp(min=torch.finfo(gradient.dtype).tiny ** 0.5), gradient)


def run_fmn(
    model: nn.Module,
    search: Search,
    *,
    steps: int,
    alpha: tuple[float, float],
    gamma: tuple[float, float],
    from_closest: bool = False,
) -> None:
    """One run on the inputs of `search`; `alpha` and `gamma` are annealed from the first value to the last.

    It starts at x, or at the closest point known, with alpha in units of that point's Euclidean distance.
    """
    x_t, epsilon, scale = search.x, torch.zeros_like(search.nearest), torch.ones_like(search.nearest)
    if from_closest:
        x_t, epsilon = search.closest[search.row], search.nearest
        scale = norm_2(x_t - search.x)
    found = torch.isfinite(search.nearest)
    for step in range(steps):
        gradient, value, logits = input_gradient(model, x_t, search.y, margin)
        wrong = search.note(x_t, logits, gradients=1)
        if not bool(search.going.any()):
            return
        x_t, gradient, value, wrong, found, epsilon, scale = search.leave(
            x_t, gradient, value, wrong, found, epsilon, scale
        )
        rate = annealed(*gamma, step, steps)
        found = found | wrong
        # Before the first misclassified point the ball reaches beyond the linearised boundary, and never shrinks: the
        # pixel box cuts moves short, and a ball that ends at the boundary may stay on its right side for ever.
        left = value.abs() / dual_norm_of(gradient, search.norm).clamp(min=1e-12)
        reach = norm_of(x_t - search.x, search.norm) + (1 + rate) * left
        outward = torch.maximum(epsilon * (1 + rate), torch.where(found, 0, reach))
        inward = torch.minimum(epsilon * (1 - rate), search.nearest)
        epsilon = torch.where(wrong, inward, outward)
        d = x_t + per_input(annealed(*alpha, step, steps) * scale, x_t) * unit(gradient) - search.x
        x_t = search.clip(search.x + shrink_to_ball(d, epsilon, search.norm))
    search.note(x_t, model(x_t))


def run_ddn(model: nn.Module, search: Search, *, steps: int, epsilon: float, gamma: float) -> None:
    """One run from x on the inputs of `search`."""
    x_t, radius = search.x, torch.full_like(search.nearest, epsilon)
    for step in range(steps):
        gradient, _, logits = input_gradient(model, x_t, search.y, cross_entropy)
        wrong = search.note(x_t, logits, gradients=1)
        if not bool(search.going.any()):
            return
        x_t, gradient, wrong, radius = search.leave(x_t, gradient, wrong, radius)
        radius = torch.where(wrong, radius * (1 - gamma), radius * (1 + gamma))
        d = x_t + annealed(1.0, 0.01, step, steps) * unit(gradient) - search.x
        x_t = search.clip(search.x + per_input(radius, d) * unit(d))
    search.note(x_t, model(x_t))


@torch.no_grad()
def fmn_nearest(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: str,
    low: float = 0.0,
    high: float = 1.0,
    *,
    noise: Noise | None = None,
    goal: float = 0.0,
    steps: int = 100,
    alpha: float = 1.0,
    gamma: float = 0.05,
) -> Nearest:
    """The closest misclassified point on FMN's path; see `fmn`. An input is done within `goal`."""
    del noise  # deterministic; taken so that every attack can be called in the same way
    if steps < 1 or not alpha > 0 or not 0 < gamma < 1:
        raise InputError(f"FMN needs steps >= 1, alpha > 0 and 0 < gamma < 1, got {steps}, {alpha} and {gamma}")
    search = Search(x, y, norm, low, high, goal)
    search.start("fmn")
    with frozen(model):
        run_fmn(model, search, steps=steps, alpha=(alpha, alpha / 100), gamma=(gamma, gamma / 50))
    return search.result()


@torch.no_grad()
def ddn_nearest(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: str = "l2",
    low: float = 0.0,
    high: float = 1.0,
    *,
    noise: Noise | None = None,
    goal: float = 0.0,
    steps: int = 100,
    epsilon: float = 1.0,
    gamma: float = 0.05,
) -> Nearest:
    """The closest misclassified point on DDN's path; see `ddn`. An input is done within `goal`."""
    del noise  # deterministic; taken so that every attack can be called in the same way
    check_handled(norm, "ddn", ("l2",))
    if steps < 1 or not epsilon > 0 or not 0 < gamma < 1:
        raise InputError(f"DDN needs steps >= 1, epsilon > 0 and 0 < gamma < 1, got {steps}, {epsilon} and {gamma}")
    search = Search(x, y, norm, low, high, goal)
    search.start("ddn")
    with frozen(model):
        run_ddn(model, search, steps=steps, epsilon=epsilon, gamma=gamma)
    return search.result()


@register(
    Attack(
        "fmn",
        summary="fast minimum-norm attack: gradient steps on a ball that follows the boundary",
        threats=tuple(BALLS),
        reference="Pintor et al., Fast minimum-norm adversarial attacks through adaptive norm constraints, 2021",
    )
)
def fmn(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: int = 100,
    alpha: float = 1.0,
    gamma: float = 0.05,
) -> AttackResult:
    """Gradient steps on the margin of Euclidean length alpha, projected onto a ball around x of radius epsilon.

    epsilon shrinks by the share gamma where x_t is misclassified and grows by it elsewhere; until a misclassified
    point is known it is the distance of the linearised boundary. alpha and gamma are annealed, to 1/100 and 1/50.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball.
        noise: not used.
        steps: gradient steps.
        alpha: length of the first step, in the input's unit.
        gamma: first relative change of epsilon.
    """
    found = fmn_nearest(
        model,
        x,
        y,
        threat.name,
        threat.low,
        threat.high,
        noise=noise,
        goal=threat.budget,
        steps=steps,
        alpha=alpha,
        gamma=gamma,
    )
    return within(model, x, y, threat, found, "fmn")


@register(
    Attack(
        "ddn",
        summary="decoupled direction and norm: cross-entropy steps on a sphere that follows the boundary",
        threats=("l2",),
        reference="Rony et al., Decoupling direction and norm for efficient gradient-based L2 adversarial attacks and "
        "defenses, 2019",
    )
)
def ddn(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: int = 100,
    epsilon: float = 1.0,
    gamma: float = 0.05,
) -> AttackResult:
    """Steps on the cross-entropy, each put onto the sphere of radius epsilon around x; L2 alone.

    epsilon shrinks by the share gamma where x_t is misclassified and grows by it elsewhere. The length of the step is
    annealed from 1 to 0.01.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an L2 ball.
        noise: not used.
        steps: gradient steps.
        epsilon: radius of the first sphere, in the input's unit.
        gamma: relative change of epsilon at each step.
    """
    found = ddn_nearest(
        model,
        x,
        y,
        threat.name,
        threat.low,
        threat.high,
        noise=noise,
        goal=threat.budget,
        steps=steps,
        epsilon=epsilon,
        gamma=gamma,
    )
    return within(model, x, y, threat, found, "ddn")
