"""How far a small change can move an explanation, and how far the gradient is from the normal of the boundary.

Chapter 3 of Wang, "On the feature alignment of deep vision models" (thesis, 2023), ties the two together: where the
saliency cannot change fast, the gradient at x is close to the gradient at the nearest boundary point.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import steepest
from holdfast.attacks.core.gradients import frozen
from holdfast.attacks.core.minimum_norm import norm_of, per_input
from holdfast.checks import check_task
from holdfast.errors import InputError
from holdfast.explanations import explain
from holdfast.explanations.core.boundary import BoundarySearch, nearest_boundary
from holdfast.explanations.core.quantity import Quantity, Setting, gradients_at, predicted, value
from holdfast.explanations.evaluate.trust import setting_for
from holdfast.random import Noise
from holdfast.threats import L2, Linf, norm_2
from holdfast.utils.show import Shown


@dataclass(frozen=True, eq=False, repr=False)
class ExplanationAttack(Shown):
    """The change of the input that moved its saliency most.

    Attributes:
        x_adv: the point, shape of x.
        rate: (B,) |A(x_adv) - A(x)|_2 / |x_adv - x|: a *lower* bound of the lambda for which the saliency is
            (lambda, eps)-robust.
        cosine: (B,) between the two saliency maps.
    """

    x_adv: Tensor
    rate: Tensor
    cosine: Tensor


def explanation_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: L2 | Linf,
    *,
    steps: int = 20,
    restarts: int = 2,
    keep_class: bool = True,
    quantity: Quantity = "logit",
    seed: int = 0,
    chunk: int = 256,
) -> ExplanationAttack:
    """Find the point of the threat set whose saliency differs most from A(x), by ascent on |A(x') - A(x)|_2.

    The ascent needs second derivatives. The logits of a ReLU network have none: there the steps are random, as in a
    random search. Its "probability" has some.

    Args:
        threat: an L2 or Linf ball; distances are measured in its norm.
        steps: steps in each run, each a tenth of the budget.
        restarts: runs, from random points.
        keep_class: count only points that are classified as x is; Ghorbani, Abid and Zou, "Interpretation of neural
            networks is fragile", 2019.
    """
    if threat.name not in ("l2", "linf") or not threat.budget > 0 or steps < 1 or restarts < 1:
        raise InputError(f"expected an L2 or Linf ball, steps and restarts >= 1, got '{threat}', {steps}, {restarts}")
    check_task(model, x, y, threat, chunk=chunk)
    parts = []
    with frozen(model):
        for rows in torch.arange(len(x), device=x.device).split(chunk):
            noise = Noise(seed, rows)
            parts.append(
                _ascend(model, x[rows].detach(), y[rows], threat, noise, steps, restarts, keep_class, quantity)
            )
    return ExplanationAttack(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _saliency(model: nn.Module, x: Tensor, y: Tensor, quantity: Quantity) -> tuple[Tensor, Tensor]:
    """The gradient at x with a graph behind it, and the predicted classes."""
    logits = model(x)
    (gradient,) = torch.autograd.grad(value(quantity)(logits, y).sum(), x, create_graph=True)
    return gradient, logits.argmax(1)


def _ascend(
    model: nn.Module, x: Tensor, y: Tensor, threat: L2 | Linf, noise: Noise, steps: int, restarts: int,
    keep_class: bool, quantity: Quantity,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with torch.enable_grad():
        first, label = _saliency(model, x.requires_grad_(True), y, quantity)
    first, x = first.detach(), x.detach()
    best, rate, cosine = x.clone(), x.new_zeros(len(x)), x.new_ones(len(x))
    tiny = torch.finfo(x.dtype).tiny ** 0.5
    for restart in range(restarts):
        x_k = threat.random_start(x, noise.fork(restart))
        for step in range(steps + 1):
            with torch.enable_grad():
                x_k = x_k.detach().requires_grad_(True)
                now, after = _saliency(model, x_k, y, quantity)
                moved = norm_2(now - first)
                ascent = torch.autograd.grad(moved.sum(), x_k, allow_unused=True)[0] if now.requires_grad else None
            x_k, now, moved = x_k.detach(), now.detach(), moved.detach()
            found = moved / norm_of(x_k - x, threat.name).clamp(min=tiny)
            better = (found > rate) & ((after == label) | (not keep_class))
            best, rate = torch.where(per_input(better, x), x_k, best), torch.where(better, found, rate)
            angle = (now * first).flatten(1).sum(1) / (norm_2(now) * norm_2(first)).clamp(min=tiny)
            cosine = torch.where(better, angle, cosine)
            # Without second derivatives the direction is random.
            random = noise.fork(restart).fork(step).normal(x.shape[1:], x.dtype)
            ascent = random if ascent is None else torch.nan_to_num(ascent)
            ascent = torch.where(per_input(norm_2(ascent) > 0, x), ascent, random)
            x_k = threat.project(x_k + 0.1 * threat.budget * steepest(threat, ascent, x_k, 0.0), x)
    return best, rate, cosine


@dataclass(frozen=True, eq=False, repr=False)
class Alignment(Shown):
    """How the explanations at the input compare with those at the boundary; all (B,).

    Attributes:
        saliency: |saliency - BSM|_2.
        integrated: |integrated gradients from black - BIG|_2.
        cosine: between the gradient of the margin at x and the normal of the nearest boundary; 1 on a linear model.
        distance: l2, of the nearest boundary; infinite where none was found.
        ok: a boundary was found; the other numbers mean nothing elsewhere.
    """

    saliency: Tensor
    integrated: Tensor
    cosine: Tensor
    distance: Tensor
    ok: Tensor


def alignment(
    model: nn.Module, x: Tensor, y: Tensor, *, search: BoundarySearch | None = None, seed: int = 0, chunk: int = 256
) -> Alignment:
    """Distances between paired explanations, as in table 3.1 of the thesis, and the angle to the boundary's normal.

    All are of the class that the model predicts: a boundary is a boundary of that class.
    """
    check_task(model, x, y, Linf(0.0), chunk=chunk)
    x = x.detach()
    with frozen(model):
        label = predicted(model, x, y, chunk)
        setting = setting_for(x, seed=seed, chunk=chunk)
        found = nearest_boundary(model, x, setting, search or BoundarySearch())
        at_x, at_b = (gradients_at(model, p, label, setting)[0] for p in (x, found.x_adv))
        margin = Setting("margin", 0.0, 1.0, setting.noise, chunk)
        at_x_m, normal = (gradients_at(model, p, label, margin)[0] for p in (x, found.x_adv))
    black, near = (
        explain(model, x, label, "integrated-gradients", baseline=b, seed=seed, chunk=chunk).attribution
        for b in ("black", found.x_adv)
    )
    tiny = torch.finfo(x.dtype).tiny ** 0.5
    cosine = (at_x_m * normal).flatten(1).sum(1) / (norm_2(at_x_m) * norm_2(normal)).clamp(min=tiny)
    ok = torch.isfinite(found.distance)
    return Alignment(norm_2(at_x - at_b), norm_2(black - near), cosine, found.distance, ok)


@dataclass(frozen=True, eq=False, repr=False)
class Proposition(Shown):
    """Both sides of |n - A(x)| <= lambda |x - x'|, n the gradient at the boundary point x'; all (B,).

    Attributes:
        left: |n - A(x)|_2.
        right: lambda times the distance, lambda the largest rate found in the ball that reaches to x'.
        rate: that lambda, a lower bound of the true one.
        ok: a boundary was found.
    """

    left: Tensor
    right: Tensor
    rate: Tensor
    ok: Tensor


def normal_bound(
    model: nn.Module, x: Tensor, y: Tensor, *, search: BoundarySearch | None = None, samples: int = 20, seed: int = 0,
    chunk: int = 256,
) -> Proposition:  # fmt: skip
    """Proposition 1: a saliency that is robust up to the boundary is close to the boundary's normal.

    lambda is at least |n - A(x)| / |x - x'|, so that the statement holds by definition; what is measured is how much
    larger the worst rate in the ball around x is, over random points in it.
    """
    paired = alignment(model, x, y, search=search, seed=seed, chunk=chunk)
    distance = torch.where(paired.ok, paired.distance, 0)
    tiny = torch.finfo(x.dtype).tiny ** 0.5
    rate = torch.where(paired.ok, paired.saliency / distance.clamp(min=tiny), 0)
    setting = setting_for(x, seed=seed, chunk=chunk)
    with frozen(model):
        label = predicted(model, x, y, chunk)
        first, _ = gradients_at(model, x, label, setting)
        for k in range(samples):
            noise = setting.noise.fork(k)
            direction = noise.normal(x.shape[1:], x.dtype)
            length = distance * noise.fork(0).uniform((), x.dtype) / norm_2(direction)
            near = (x + per_input(length, x) * direction).clamp(0, 1)
            now, _ = gradients_at(model, near, label, setting)
            found = norm_2(now - first) / norm_2(near - x).clamp(min=tiny)
            rate = torch.where(paired.ok, torch.maximum(rate, found), rate)
    return Proposition(paired.saliency, rate * distance, rate, paired.ok)
