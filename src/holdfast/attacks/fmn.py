"""FMN: gradient steps of a given length, projected onto a ball that shrinks while x_t is misclassified."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import input_gradient
from holdfast.attacks.core.losses import margin
from holdfast.attacks.core.minimum_norm import (
    BALLS,
    Search,
    annealed,
    by_search,
    dual_norm_of,
    in_threat,
    norm_of,
    per_input,
    unit,
)
from holdfast.registry import Attack
from holdfast.threats import norm_2
from holdfast.utils.options import Count, Inside, Positive


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
        x_t, epsilon = search.x_adv[search.row], search.nearest
        scale = norm_2(x_t - search.x)
    found = torch.isfinite(search.nearest)
    for step in range(steps):
        gradient, value, logits = input_gradient(model, x_t, search.y, margin)
        wrong = search.note(x_t, logits, gradients=1)
        if search.over:
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


@by_search
def fmn_nearest(
    model: nn.Module, search: Search, *, steps: Count = 100, alpha: Positive = 1.0, gamma: Inside = 0.05
) -> None:
    """Take gradient steps of length alpha on the margin, each projected onto a ball of radius epsilon around x.

    epsilon shrinks by the share gamma where x_t is misclassified and grows by it elsewhere; until a misclassified
    point is known it is the distance of the linearised boundary. alpha and gamma are annealed, to 1/100 and 1/50.

    Args:
        alpha: length of the first step, in the input's unit.
        gamma: first relative change of epsilon.
    """
    search.start("fmn")
    run_fmn(model, search, steps=steps, alpha=(alpha, alpha / 100), gamma=(gamma, gamma / 50))


fmn = Attack(
    "fmn",
    summary="fast minimum-norm attack: gradient steps on a ball that follows the boundary",
    threats=tuple(BALLS),
    nearest=fmn_nearest,
    reference="Pintor et al., Fast minimum-norm adversarial attacks through adaptive norm constraints, 2021",
)(in_threat("fmn", fmn_nearest))
