"""Projected gradient ascent on the loss: FGSM, PGD, and the inner loop of adversarial training."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen, input_gradient, look
from holdfast.attacks.core.losses import Loss, TargetedLoss, get_loss
from holdfast.attacks.core.stages import group_size, run_stages, survivors
from holdfast.attacks.fast.chain import well_laid_out
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import L1, L2, Box, Linf, Threat, norm_2

BALLS = ("linf", "l2", "l1", "box")


def steepest(threat: Threat, gradient: Tensor, x: Tensor, sparsity: float) -> Tensor:
    """Direction of steepest ascent with one unit of the threat's norm, shape of x.

    Linf: sign(g). L2: g / |g|. L1: equal steps on the share `sparsity` of values with the largest |g| that can still
    move (Tramer and Boneh, "Adversarial training and robustness for multiple perturbations", 2019); at least one value.
    """
    if isinstance(threat, Linf):
        return gradient.sign()
    if isinstance(threat, Box):
        return gradient.sign() * threat.radius.to(x)
    flat = gradient.flatten(1)
    if isinstance(threat, L2):
        norm = norm_2(flat).clamp(min=torch.finfo(x.dtype).tiny)
        return (flat / norm[:, None]).view_as(x)
    if isinstance(threat, L1):
        room = torch.where(flat > 0, threat.high - x.flatten(1), x.flatten(1) - threat.low)
        size = torch.where(room > 0, flat.abs(), torch.zeros_like(flat))
        count = max(1, round(sparsity * flat.shape[1]))
        index = size.topk(count, dim=1).indices
        return torch.zeros_like(flat).scatter(1, index, flat.gather(1, index).sign() / count).view_as(x)
    raise InputError(f"gradient steps are not defined for the threat '{threat}'")


def perturb(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise,
    steps: int,
    step_size: float,
    loss: str | Loss = "ce",
    random_start: bool = True,
    start: Tensor | None = None,
    sparsity: float = 0.01,
    watch: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The last iterate of projected gradient ascent, all steps for every input: what adversarial training needs.

    It starts at `start` if that is given; `watch` is shown the logits (B, K) at each iterate but the last.
    """
    x = well_laid_out(model, x)
    loss, project = get_loss(loss), _projection(threat, x)
    x_adv = x if start is None else start
    if random_start and start is None:
        x_adv = threat.random_start(x, noise)
    with frozen(model):
        for _ in range(steps):
            gradient, _, logits = input_gradient(model, x_adv, y, loss)
            if watch is not None:
                watch(logits)
            x_adv = project(torch.add(x_adv, steepest(threat, gradient, x_adv, sparsity), alpha=step_size))
    return x_adv.detach()


def _projection(threat: Threat, x: Tensor) -> Callable[[Tensor], Tensor]:
    """`threat.project` around x for tensors that nobody else holds; the box of an Linf ball is made once."""
    if type(threat) is Linf:
        lower, upper = threat.box(x)
        return lambda moved: moved.clamp_(lower, upper)
    return lambda moved: threat.project(moved, x)


@torch.no_grad()
def ascend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    x_start: Tensor,
    *,
    loss: Loss | TargetedLoss,
    steps: int,
    step_size: float,
    name: str,
    target: Tensor | None = None,
    decay: float = 0.0,
    sparsity: float = 0.01,
) -> AttackResult:
    """Gradient ascent with momentum; an input is done at its first misclassified iterate, and leaves with its group.

    g <- decay * g + gradient / |gradient|_1;  x_adv <- project(x_adv + step_size * steepest(g)). Decay 0 is plain PGD.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).  x_start: a point of the set, shape of x.
        loss: (logits, y) -> (B,) to maximise, or (logits, y, target) -> (B,) where `target`, shape (B,), is given.
        step_size: in the threat's own unit.
        name: what `by` says where the run succeeds.
        sparsity: share of the values that one L1 step moves.
    """
    group, dims = group_size(len(x)), [1] * (x.ndim - 1)
    found, success, looks = x_start.clone(), torch.zeros_like(y, dtype=torch.bool), torch.zeros_like(y)
    row, done, aim = torch.arange(len(x), device=x.device), success, y if target is None else target
    x_adv, best, best_loss, momentum = (
        x_start,
        x_start,
        x.new_full((len(x),), -torch.inf),
        torch.zeros_like(x) if decay else y,
    )

    def objective(logits: Tensor, y: Tensor) -> Tensor:
        return cast(Loss, loss)(logits, y) if target is None else cast(TargetedLoss, loss)(logits, y, aim)

    with frozen(model):
        for step in range(steps + 1):
            looks[row] += ~done
            if step < steps:
                gradient, values, logits = input_gradient(model, x_adv, y, objective)
            else:
                values, logits = look(model, x_adv, y, objective)
            wrong = logits.argmax(1) != y
            better = ~done & (wrong | (values > best_loss))
            best = torch.where(better.view(-1, *dims), x_adv, best)
            best_loss = torch.where(better, values, best_loss)
            done = done | wrong
            if step == steps or bool(done.all()):
                break
            if decay:
                size = gradient.flatten(1).abs().sum(1).clamp(min=torch.finfo(x.dtype).tiny)
                gradient = momentum = decay * momentum + gradient / size.view(-1, *dims)
            stay = survivors(done, group)
            if stay is not None:
                found[row], success[row] = best, done
                row, done, x, y, aim, x_adv = row[stay], done[stay], x[stay], y[stay], aim[stay], x_adv[stay]
                best, best_loss, gradient, momentum = best[stay], best_loss[stay], gradient[stay], momentum[stay]
            x_adv = threat.project(x_adv + step_size * steepest(threat, gradient, x_adv, sparsity), x)
    found[row], success[row] = best, done
    by = tuple(name if broken else "" for broken in success.tolist())
    return AttackResult(found, success, by, looks.clamp(max=steps), looks)


@register(
    Attack(
        "pgd",
        summary="projected gradient ascent with random restarts",
        threats=BALLS,
        reference="Madry et al., Towards deep learning models resistant to adversarial attacks, 2018",
    )
)
@torch.no_grad()
def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: int = 40,
    step_size: float | None = None,
    restarts: int = 1,
    loss: str | Loss = "ce",
    random_start: bool = True,
    sparsity: float = 0.01,
) -> AttackResult:
    """Projected gradient ascent; an input leaves the batch once broken, restarts run on the survivors alone.

    Per step: x_adv <- project(x_adv + step_size * steepest(gradient)).

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball.
        noise: source of the random starts; seed 0 for inputs 0 ... B-1 if none is given.
        steps: gradient steps of each run.
        step_size: in the threat's own unit; 2.5 * budget / steps if none is given.
        restarts: runs in all; the first one included.
        loss: "ce", "margin" or a function (logits, y) -> (B,) to maximise.
        random_start: start at a random point of the set instead of x.
        sparsity: share of the values that one L1 step moves.
    """
    if steps < 1 or restarts < 1:
        raise InputError(f"steps and restarts must be at least 1, got {steps} and {restarts}")
    step_size = 2.5 * threat.budget / steps if step_size is None else step_size
    noise = noise or Noise.for_batch(0, len(x), x.device)
    loss_function = get_loss(loss)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart)) if random_start else x
        task = (model, x, y, threat, x_start)
        return ascend(*task, steps=steps, step_size=step_size, loss=loss_function, sparsity=sparsity, name="pgd")

    return run_stages(x, y, noise, [lambda *task, r=r: run(r, *task) for r in range(restarts)])


@register(
    Attack(
        "fgsm",
        summary="one gradient step of the full budget",
        threats=BALLS,
        reference="Goodfellow, Shlens and Szegedy, Explaining and harnessing adversarial examples, 2015",
    )
)
@torch.no_grad()
def fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    loss: str | Loss = "ce",
) -> AttackResult:
    """x + budget * steepest(gradient), projected: exact on linear models, weak elsewhere. Prefer `pgd`.

    For L1 all of the budget goes to the one value with the largest gradient.
    """
    del noise  # deterministic; taken so that every attack can be called in the same way
    return ascend(
        model, x, y, threat, x, steps=1, step_size=threat.budget, loss=get_loss(loss), sparsity=0.0, name="fgsm"
    )
