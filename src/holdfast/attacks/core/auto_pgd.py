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

from holdfast.attacks.core.gradients import frozen, input_gradient, look
from holdfast.attacks.core.losses import Loss, TargetedLoss
from holdfast.attacks.core.stages import group_size, survivors
from holdfast.attacks.pgd import steepest
from holdfast.errors import InputError
from holdfast.results import AttackResult
from holdfast.threats import L1, L2, Threat, norm_2


@dataclass(frozen=True, eq=False)
class ApgdResult(AttackResult):
    """An attack's result from which others can go on.

    Attributes:
        loss: (B,) loss at `x_adv`: the highest of all iterates, or that of the first misclassified one.
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
class _State:
    """All that follows an input through a run; every field has one row for each input still in the batch."""

    row: Tensor  # position in the batch
    x: Tensor
    y: Tensor
    target: Tensor  # y where there is no target
    lower: Tensor  # corners of the box around the set
    upper: Tensor
    x_adv: Tensor  # x_k
    x_old: Tensor  # x_{k-1}
    gradient: Tensor  # at x_k
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    previous: Tensor  # loss at x_{k-1}; infinite at first, so that the first loss is no rise
    rises: Tensor  # steps since the last checkpoint that raised the loss
    step_size: Tensor
    best_before: Tensor  # best loss at the last checkpoint
    halved: Tensor  # at the last checkpoint; True at first, so that condition 2 needs two of them
    changed: Tensor  # L1: values that the best point changes, at the last checkpoint
    done: Tensor

    @classmethod
    def start(cls, x: Tensor, y: Tensor, target: Tensor, threat: Threat, x_start: Tensor) -> "_State":
        inf = x.new_full((len(x),), torch.inf)
        first = threat.budget if isinstance(threat, L1) else 2 * threat.budget
        lower, upper = threat.box(x)
        return cls(
            row=torch.arange(len(x), device=x.device), x=x, y=y, target=target, lower=lower, upper=upper,
            x_adv=x_start, x_old=x_start, gradient=x, best=x_start.clone(), best_gradient=torch.zeros_like(x),
            best_loss=-inf, previous=inf, rises=torch.zeros_like(y), step_size=torch.full_like(inf, first),
            best_before=-inf, halved=torch.ones_like(y, dtype=torch.bool), changed=_changed(x_start, x),
            done=torch.zeros_like(y, dtype=torch.bool)
        )  # fmt: skip

    def select(self, rows: Tensor) -> "_State":
        return _State(*(getattr(self, field.name)[rows] for field in fields(self)))

    def keep(self, better: Tensor, values: Tensor) -> None:
        """Takes the iterate as the best one where it is; row by row, for `torch.where` costs ten times as much."""
        rows = better.nonzero()[:, 0]
        self.best.index_copy_(0, rows, self.x_adv.index_select(0, rows))
        self.best_gradient.index_copy_(0, rows, self.gradient.index_select(0, rows))
        self.best_loss = torch.where(better, values, self.best_loss)

    def back_to_best(self, where: Tensor) -> None:
        self.x_adv = torch.where(_wide(where, self.x), self.best, self.x_adv)
        self.gradient = torch.where(_wide(where, self.x), self.best_gradient, self.gradient)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1, ...)."""
    return values.view(-1, *[1] * (like.ndim - 1))


def _changed(x_adv: Tensor, x: Tensor) -> Tensor:
    """(B,) number of values that differ."""
    return (x_adv != x).flatten(1).sum(1)


def _into(threat: Threat, z: Tensor, s: _State) -> Tensor:
    """A point of the set near z, which is overwritten. L2: scaled into the ball, then clipped to the range.

    For L2 that is not the nearest point, but it needs no sort; the difference vanishes as the steps get shorter.
    """
    if isinstance(threat, L2):
        z.sub_(s.x)
        z.mul_(_wide(threat.eps / norm_2(z).clamp(min=max(threat.eps, torch.finfo(z.dtype).tiny)), z)).add_(s.x)
    return z.clamp_(s.lower, s.upper)


def _dense_step(threat: Threat, s: _State, momentum: float) -> Tensor:
    """z = P(x_k + step * steepest); x_{k+1} = P(x_k + momentum (z - x_k) + (1 - momentum) (x_k - x_{k-1}))."""
    z = steepest(threat, s.gradient, s.x_adv, 0.0).mul_(_wide(s.step_size, s.x)).add_(s.x_adv)
    z = _into(threat, z, s)
    if momentum == 1.0:
        return z
    z.mul_(momentum).add_(s.x_adv, alpha=2 * (1 - momentum)).sub_(s.x_old, alpha=1 - momentum)
    return _into(threat, z, s)


def _sparse_step(threat: L1, s: _State) -> Tensor:
    """x_{k+1} = P(x_k + step * u), u equal on the largest |g|: on two thirds as many values as the best point changes.

    Departs from the paper: values at the end of the range that g points to are passed over, and the count is rounded
    down. Equal steps on all the changed values would cancel in the projection, and the run would stand still.
    """
    end = torch.where(s.gradient > 0, threat.high, threat.low)
    size = torch.where(s.x_adv == end, 0.0, s.gradient.abs()).flatten(1)
    count = (2 * s.changed // 3).clamp(min=1)
    largest = size.topk(int(count.max()), dim=1).values
    chosen = (size > 0) & (size >= largest.gather(1, count[:, None] - 1))
    u = s.gradient.sign() * chosen.view_as(s.x)
    u *= _wide(s.step_size / chosen.sum(1).clamp(min=1), s.x)
    return threat.project(u.add_(s.x_adv), s.x)


def _check_dense(s: _State, length: int, rho: float) -> None:
    """Halves the step size where it no longer serves, and goes on from the best point there."""
    halved = halves(s.rises, length, s.best_loss, s.best_before, s.halved, rho)
    s.step_size = torch.where(halved, s.step_size / 2, s.step_size)
    s.back_to_best(halved)
    s.halved, s.best_before, s.rises = halved, s.best_loss, torch.zeros_like(s.rises)


def _check_sparse(s: _State, full: float) -> None:
    """Full steps from the best point where that has become sparser by 5 %, else shorter ones, down to a tenth."""
    changed = _changed(s.best, s.x)
    sparser = changed < 0.95 * s.changed
    s.step_size = torch.where(sparser, full, (s.step_size / 1.5).clamp(min=full / 10))
    s.back_to_best(sparser)
    s.changed = changed


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One run on one set: best point (shape of x), its loss, success and number of points looked at, (B,) each.

    With `leave` an input is done at its first misclassified iterate, keeps it, and leaves with its group.
    """
    s = _State.start(x, y, y if target is None else target, threat, threat.project(x_start, x))
    best, best_loss, success, looks = s.best.clone(), s.best_loss.clone(), s.done.clone(), torch.zeros_like(y)
    group, last_check, every = group_size(len(x)), 0, max(4 * steps // 100, 1)
    checks = range(every, steps, every) if isinstance(threat, L1) else checkpoints(steps)

    def objective(logits: Tensor, y: Tensor) -> Tensor:
        return cast(Loss, loss)(logits, y) if target is None else cast(TargetedLoss, loss)(logits, y, s.target)

    for step in range(steps + 1):
        looks[s.row] += ~s.done
        if step < steps:
            s.gradient, values, logits = _mean(samples, input_gradient, model, s.x_adv, s.y, objective)
        else:
            values, logits = _mean(samples, look, model, s.x_adv, s.y, objective)
        better = values > s.best_loss
        if leave:
            wrong = logits.argmax(1) != s.y
            better = (better | wrong) & ~s.done
            s.done = s.done | wrong
        s.keep(better, values)
        s.rises += values > s.previous
        s.previous = values
        stay = survivors(s.done, group) if leave and step < steps else None
        if stay is not None:
            best[s.row], best_loss[s.row], success[s.row] = s.best, s.best_loss, s.done
            s = s.select(stay)
        if step == steps or len(s.row) == 0:
            break
        if step in checks:
            if isinstance(threat, L1):
                _check_sparse(s, threat.eps)
            else:
                _check_dense(s, step - last_check, rho)
            last_check = step
        x_next = (
            _sparse_step(threat, s) if isinstance(threat, L1) else _dense_step(threat, s, momentum if step else 1.0)
        )
        s.x_adv, s.x_old = x_next, s.x_adv
    best[s.row], best_loss[s.row], success[s.row] = s.best, s.best_loss, s.done
    return best, best_loss, success, looks


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
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball or a Box.
        x_start: where to start, shape of x; it is projected first.
        loss: a function (logits, y) -> (B,) to maximise, or (logits, y, target) -> (B,) where `target` is given.
        steps: gradient steps.
        name: what `by` says where the run succeeds.
        target: class to aim at, shape (B,).
        samples: passes whose gradients, losses and logits are averaged, for models that draw random numbers.
        momentum: weight of the new step; the rest goes to the step before.
        rho: share of the steps between two checkpoints that must raise the loss.
    """
    if steps < 1 or samples < 1:
        raise InputError(f"steps and samples must be at least 1, got {steps} and {samples}")
    runs: list[tuple[Threat, int]] = [(threat, steps)]
    if isinstance(threat, L1):
        part = 3 * steps // 10
        wider = [(replace(threat, eps=factor * threat.eps), part) for factor in (3, 2)] if part else []
        runs = [*wider, (threat, steps - part * len(wider))]
    ascend = partial(_ascend, model, x, y, target, loss=loss, samples=samples, momentum=momentum, rho=rho)
    queries, gradients, best = torch.zeros_like(y), torch.zeros_like(y), x_start
    with frozen(model):
        for i, (ball, count) in enumerate(runs):
            best, best_loss, success, looks = ascend(ball, best, steps=count, leave=i == len(runs) - 1)
            queries += looks * samples
            gradients += looks.clamp(max=count) * samples
    by = tuple(name if broken else "" for broken in success.tolist())
    return ApgdResult(best, success, by, gradients, queries, best_loss)
