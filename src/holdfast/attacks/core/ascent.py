"""Projected gradient ascent on the loss: the loop that PGD, FGSM, their descendants and adversarial training share."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen, input_gradient, is_late, look
from holdfast.attacks.core.losses import Loss, TargetedLoss, get_loss
from holdfast.attacks.core.survivors import Survivors
from holdfast.attacks.fast.chain import well_laid_out
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.results import AttackResult
from holdfast.threats import L1, L2, Box, Linf, Threat, norm_2

BALLS = ("linf", "l2", "l1", "box")
"""Threats with a direction of steepest ascent."""
Move = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From an iterate, the gradient there and the input, each (B, ...), to the next iterate."""


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
    """Take all steps for every input and return the last iterate, shape of x: what adversarial training needs.

    The ascent begins at `start` if it is given; `watch` sees the logits (B, K) at each iterate but the last.
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
def climb(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    x_start: Tensor,
    move: Move,
    *,
    loss: Loss | TargetedLoss,
    steps: int,
    name: str,
    target: Tensor | None = None,
    decay: float = 0.0,
) -> AttackResult:
    """Go up the loss by `move`; an input is done at its first misclassified iterate, and leaves with its group.

    With a decay the gradient is a momentum: g <- decay * g + gradient / |gradient|_1.

    Args:
        x_start: a point of the set, shape of x.
        move: one step of the ascent.
        loss: (logits, y) -> (B,) to maximise, or (logits, y, target) -> (B,) if `target`, shape (B,), is given.
        name: what `by` says of the inputs that the run breaks.
    """
    s, x_adv, aim = Survivors(x, y, x_start), x_start, y if target is None else target
    momentum, dims = torch.zeros_like(x) if decay else y, [1] * (x.ndim - 1)

    def objective(logits: Tensor, y: Tensor) -> Tensor:
        return cast(Loss, loss)(logits, y) if target is None else cast(TargetedLoss, loss)(logits, y, aim)

    with frozen(model):
        for step in range(steps + 1):
            s.count(gradients=int(step < steps))
            if step < steps:
                gradient, values, logits = input_gradient(model, x_adv, s.y, objective, full=is_late(step, steps))
            else:
                values, logits = look(model, x_adv, s.y, objective)
            s.keep(x_adv, values, logits.argmax(1) != s.y)
            if step == steps or s.over:
                break
            if decay:
                size = gradient.flatten(1).abs().sum(1).clamp(min=torch.finfo(x.dtype).tiny)
                gradient = momentum = decay * momentum + gradient / size.view(-1, *dims)
            aim, x_adv, gradient, momentum = s.leave(aim, x_adv, gradient, momentum)
            x_adv = move(x_adv, gradient, s.x)
    return s.result(name)


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
    """`climb` by projected steps of steepest ascent: x_adv <- project(x_adv + step_size * steepest(gradient)).

    Args:
        step_size: in the threat's own unit.
        sparsity: share of the values that one L1 step moves.
    """

    def move(x_adv: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
        return threat.project(x_adv + step_size * steepest(threat, gradient, x_adv, sparsity), x)

    return climb(model, x, y, x_start, move, loss=loss, steps=steps, name=name, target=target, decay=decay)
