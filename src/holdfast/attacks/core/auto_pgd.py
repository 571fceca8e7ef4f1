"""Auto-PGD: projected gradient ascent with momentum that sets its own step size.

Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks",
2020; for L1 the sparse steps of Croce and Hein, "Mind the box: L1-APGD for sparse adversarial attacks on image
classifiers", 2021.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import steepest
from holdfast.attacks.core.gradients import frozen, input_gradient, is_late, look
from holdfast.attacks.core.losses import Loss, TargetedLoss
from holdfast.attacks.core.survivors import Survivors, broken_by
from holdfast.results import AttackResult
from holdfast.threats import L1, L2, Threat, norm_2
from holdfast.utils import clock


@dataclass(frozen=True, eq=False, repr=False)
class ApgdResult(AttackResult):
    """An attack's result from which others can go on.

    Attributes:
        loss: (B,) loss at `x_adv`: the highest of all iterates, or the loss of the first misclassified one.
    """

    loss: Tensor


def checkpoints(steps: int) -> list[int]:
    """Steps after which the step size is looked at: ceil(p_j * steps), p_1 = 0.22, p_{j+1} - p_j shrinks to 0.06.

    >>> checkpoints(100)
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    before, p, found = 0, 22, set()  # in hundredths, so that the ceiling is exact
    while p <= 100:
        found.add(-(-p * steps // 100))
        before, p = p, p + max(p - before - 3, 6)
    return sorted(found)


def halves(rises: Tensor, length: int, best: Tensor, best_before: Tensor, halved: Tensor, rho: float) -> Tensor:
    """(B,) bool: is the step size halved at a checkpoint?

    Condition 1: at most the share `rho` of the `length` steps since the last checkpoint raised the loss. Condition 2:
    the step size was kept at the last checkpoint, and the best loss has not improved since.

    Args:
        rises: (B,) steps since the last checkpoint that raised the loss.
        best, best_before: (B,) best loss now and at the last checkpoint.
        halved: (B,) bool, was the step size halved at the last checkpoint?
    """
    return (rises <= rho * length) | (~halved & (best <= best_before))


@dataclass
class _Track:
    """What follows each unbroken input through a run; every field has one row for each input of the run."""

    target: Tensor  # y if there is no target
    lower: Tensor  # corners of the box around the set
    upper: Tensor
    x_adv: Tensor  # x_k
    x_old: Tensor  # x_{k-1}
    gradient: Tensor  # at x_k
    best_gradient: Tensor
    previous: Tensor  # loss at x_{k-1}; infinite at first, so that the first loss is no rise
    rises: Tensor  # steps since the last checkpoint that raised the loss
    step_size: Tensor
    best_before: Tensor  # best loss at the last checkpoint
    halved: Tensor  # at the last checkpoint; True at first, so that condition 2 needs two of them
    changed: Tensor  # L1: values that the best point changes, at the last checkpoint

    @classmethod
    def start(cls, x: Tensor, target: Tensor, threat: Threat, x_start: Tensor) -> "_Track":
        inf = x.new_full((len(x),), torch.inf)
        first = threat.budget if isinstance(threat, L1) else 2 * threat.budget
        lower, upper = threat.box(x)
        return cls(
            target=target, lower=lower, upper=upper, x_adv=x_start, x_old=x_start, gradient=x,
            best_gradient=torch.zeros_like(x), previous=inf, rises=torch.zeros_like(target),
            step_size=torch.full_like(inf, first), best_before=-inf,
            halved=torch.ones_like(target, dtype=torch.bool), changed=_changed(x_start, x)
        )  # fmt: skip

    def select(self, rows: Tensor) -> "_Track":
        return _Track(*(getattr(self, field.name)[rows] for field in fields(self)))

    def note(self, s: Survivors, values: Tensor, wrong: Tensor | None) -> None:
        """Keep the iterate if it beats the best one; row by row, for `torch.where` costs ten times as much."""
        rows = s.keep(self.x_adv, values, wrong)
        self.best_gradient.index_copy_(0, rows, self.gradient.index_select(0, rows))
        self.rises += values > self.previous
        self.previous = values

    def back_to_best(self, s: Survivors, where: Tensor) -> None:
        """Go on from the best point `where` (R,) bool is true."""
        self.x_adv = torch.where(_wide(where, s.x), s.x_adv[s.row], self.x_adv)
        self.gradient = torch.where(_wide(where, s.x), self.best_gradient, self.gradient)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1, ...)."""
    return values.view(-1, *[1] * (like.ndim - 1))


def _changed(x_adv: Tensor, x: Tensor) -> Tensor:
    """(B,) number of values that differ."""
    return (x_adv != x).flatten(1).sum(1)


def _into(threat: Threat, z: Tensor, x: Tensor, t: _Track) -> Tensor:
    """Overwrite z with a point of the set near it. L2: scaled into the ball, then clipped to the range.

    For L2 that is not the nearest point, but it needs no sort; the difference vanishes as the steps get shorter.
    """
    if isinstance(threat, L2):
        z.sub_(x)
        z.mul_(_wide(threat.eps / norm_2(z).clamp(min=max(threat.eps, torch.finfo(z.dtype).tiny)), z)).add_(x)
    return z.clamp_(t.lower, t.upper)


def _dense_step(threat: Threat, x: Tensor, t: _Track, momentum: float) -> Tensor:
    """z = P(x_k + step * steepest); x_{k+1} = P(x_k + momentum (z - x_k) + (1 - momentum) (x_k - x_{k-1}))."""
    z = steepest(threat, t.gradient, t.x_adv, 0.0).mul_(_wide(t.step_size, x)).add_(t.x_adv)
    z = _into(threat, z, x, t)
    if momentum == 1.0:
        return z
    z.mul_(momentum).add_(t.x_adv, alpha=2 * (1 - momentum)).sub_(t.x_old, alpha=1 - momentum)
    return _into(threat, z, x, t)


def _sparse_step(threat: L1, x: Tensor, t: _Track) -> Tensor:
    """x_{k+1} = P(x_k + step * u), u equal on the largest |g|: on two thirds as many values as the best point changes.

    Departs from the paper: values at the end of the range that g points to are passed over, and the count is rounded
    down. Equal steps on all the changed values would cancel in the projection, and the run would stand still.
    """
    end = torch.where(t.gradient > 0, threat.high, threat.low)
    size = torch.where(t.x_adv == end, 0.0, t.gradient.abs()).flatten(1)
    count = (2 * t.changed // 3).clamp(min=1)
    largest = size.topk(int(count.max()), dim=1).values
    chosen = (size > 0) & (size >= largest.gather(1, count[:, None] - 1))
    u = t.gradient.sign() * chosen.view_as(x)
    u *= _wide(t.step_size / chosen.sum(1).clamp(min=1), x)
    return threat.project(u.add_(t.x_adv), x)


def _check_dense(s: Survivors, t: _Track, length: int, rho: float) -> None:
    """Halve the step size of the inputs that it no longer serves, and send them back to their best point."""
    halved = halves(t.rises, length, s.best, t.best_before, t.halved, rho)
    t.step_size = torch.where(halved, t.step_size / 2, t.step_size)
    t.back_to_best(s, halved)
    t.halved, t.best_before, t.rises = halved, s.best, torch.zeros_like(t.rises)


def _check_sparse(s: Survivors, t: _Track, full: float) -> None:
    """Take full steps from the best point if it has become sparser by 5 %, else shorter ones, down to a tenth."""
    changed = _changed(s.x_adv[s.row], s.x)
    sparser = changed < 0.95 * t.changed
    t.step_size = torch.where(sparser, full, (t.step_size / 1.5).clamp(min=full / 10))
    t.back_to_best(s, sparser)
    t.changed = changed


def _mean(samples: int, evaluate: Callable[..., tuple[Tensor, ...]], *task: Any) -> tuple[Tensor, ...]:
    """Each tensor that `evaluate` gives, averaged over that many calls."""
    if samples == 1:
        return evaluate(*task)
    return tuple(torch.stack(values).mean(0) for values in zip(*(evaluate(*task) for _ in range(samples)), strict=True))


def _ascend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    target: Tensor | None,
    threat: Threat,
    x_start: Tensor,
    *,
    loss: Loss | TargetedLoss,
    steps: int,
    samples: int,
    momentum: float,
    rho: float,
    leave: bool,
) -> Survivors:
    """One run on one set. With `leave` an input is done at its first misclassified iterate, and leaves with its group.

    `queries` counts the points that it looks at, `gradients` those with a gradient.
    """
    x_start = threat.project(x_start, x)
    s, t = Survivors(x, y, x_start), _Track.start(x, y if target is None else target, threat, x_start)
    last_check, every = 0, max(4 * steps // 100, 1)
    checks = range(every, steps, every) if isinstance(threat, L1) else checkpoints(steps)

    def objective(logits: Tensor, y: Tensor) -> Tensor:
        return cast(Loss, loss)(logits, y) if target is None else cast(TargetedLoss, loss)(logits, y, t.target)

    for step in range(steps + 1):
        s.count(gradients=samples * (step < steps), queries=samples)
        if step < steps:
            gradient = partial(input_gradient, full=is_late(step, steps))
            t.gradient, values, logits = _mean(samples, gradient, model, t.x_adv, s.y, objective)
        else:
            values, logits = _mean(samples, look, model, t.x_adv, s.y, objective)
        t.note(s, values, logits.argmax(1) != s.y if leave else None)
        stay = s.drop() if leave and step < steps else None
        if stay is not None:
            t = t.select(stay)
        if step == steps or len(s.row) == 0 or clock.over():
            break
        if step in checks:
            if isinstance(threat, L1):
                _check_sparse(s, t, threat.eps)
            else:
                _check_dense(s, t, step - last_check, rho)
            last_check = step
        weight = momentum if step else 1.0
        x_next = _sparse_step(threat, s.x, t) if isinstance(threat, L1) else _dense_step(threat, s.x, t, weight)
        t.x_adv, t.x_old = x_next, t.x_adv
    return s


@torch.no_grad()
def auto_pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    x_start: Tensor,
    *,
    loss: Loss | TargetedLoss,
    steps: int,
    name: str,
    target: Tensor | None = None,
    samples: int = 1,
    momentum: float = 0.75,
    rho: float = 0.75,
) -> ApgdResult:
    """One run of Auto-PGD from `x_start`; an input is done at its first misclassified iterate.

    The first step size is twice the budget; at the `checkpoints` it is halved where it no longer serves (`halves`), and
    the ascent goes on from the best point. L1: three tenths of the steps on the ball of three times the budget, three
    tenths on twice, the rest on the ball itself, each from the best point of the one before; only the last can succeed.
    The best point is `x_adv` and its loss `loss`, from which other attacks can go on.

    Args:
        threat: an Lp ball or a Box.
        x_start: where to start, shape of x; it is projected first.
        loss: a function (logits, y) -> (B,) to maximise, or (logits, y, target) -> (B,) where `target` is given.
        name: what `by` says where the run succeeds.
        target: class to aim at, shape (B,).
        samples: passes whose gradients, losses and logits are averaged, for models that draw random numbers.
        momentum: weight of the new step; the rest goes to the step before.
        rho: share of the steps between two checkpoints that must raise the loss.
    """
    runs: list[tuple[Threat, int]] = [(threat, steps)]
    if isinstance(threat, L1):
        part = 3 * steps // 10
        wider = [(replace(threat, eps=factor * threat.eps), part) for factor in (3, 2)] if part else []
        runs = [*wider, (threat, steps - part * len(wider))]
    ascend = partial(_ascend, model, x, y, target, loss=loss, samples=samples, momentum=momentum, rho=rho)
    queries, gradients, best = torch.zeros_like(y), torch.zeros_like(y), x_start
    with frozen(model):
        for i, (ball, count) in enumerate(runs):
            s = ascend(ball, best, steps=count, leave=i == len(runs) - 1)
            best, queries, gradients = s.x_adv, queries + s.queries, gradients + s.gradients
    return ApgdResult(best, s.success, broken_by(name, s.success), gradients, queries, s.loss)
