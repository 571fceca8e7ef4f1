"""FGSM and its descendants: one gradient step, with a random step first, many steps, momentum.

All are weaker than `pgd`; they are here to compare with papers.
"""

from functools import partial

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS, ascend, steepest
from holdfast.attacks.core.losses import Loss, get_loss
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Threat
from holdfast.utils.options import Count, NotNegative, Unit


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
    """Return x + budget * steepest(gradient), projected: exact on linear models, weak elsewhere. Prefer `pgd`.

    For L1 all of the budget goes to the one value with the largest gradient.
    """
    del noise  # deterministic; taken so that every attack can be called in the same way
    return ascend(
        model, x, y, threat, x, steps=1, step_size=threat.budget, loss=get_loss(loss), sparsity=0.0, name="fgsm"
    )


@register(
    Attack(
        "r-fgsm",
        summary="a random step, then one gradient step with the rest of the budget",
        threats=BALLS,
        reference="Tramer et al., Ensemble adversarial training: attacks and defenses, 2018",
    )
)
@torch.no_grad()
def r_fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    loss: str | Loss = "ce",
    random_share: Unit = 0.5,
) -> AttackResult:
    """R+FGSM: x' = x + alpha * steepest(normal noise), then x' + (budget - alpha) * steepest(gradient at x').

    It leaves the region around x where a masked gradient says nothing. Linf: sign steps, as in the paper; L2: steps in
    the direction itself; L1: each of the two steps moves one value.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball or a Box.
        noise: source of the random step; seed 0 for inputs 0 ... B-1 if none is given.
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.
        random_share: alpha / budget.
    """
    noise = noise or Noise.for_batch(0, len(x), x.device)
    alpha = random_share * threat.budget
    direction = steepest(threat, noise.normal(x.shape[1:], x.dtype), x, 0.0)
    x_start = threat.project(x + alpha * direction, x)
    rest = threat.budget - alpha
    return ascend(
        model, x, y, threat, x_start, loss=get_loss(loss), steps=1, step_size=rest, sparsity=0.0, name="r-fgsm"
    )


@register(
    Attack(
        "i-fgsm",
        summary="FGSM in several small steps from the input itself",
        threats=BALLS,
        reference="Kurakin, Goodfellow and Bengio, Adversarial examples in the physical world, 2017",
    )
)
@torch.no_grad()
def i_fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: Count = 10,
    step_size: NotNegative | None = None,
    loss: str | Loss = "ce",
    sparsity: Unit = 0.01,
) -> AttackResult:
    """x_adv <- project(x_adv + step_size * steepest(gradient)), from x; also known as the basic iterative method.

    The paper takes steps of one grey level, min(levels + 4, 1.25 * levels) of them, which are 10 for a budget of 8/255.
    Here 10 is the default for every budget, with steps that add up to it: the rule has no meaning for L2 and L1.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball or a Box.
        steps: gradient steps.
        step_size: in the threat's own unit; budget / steps if none is given.
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.
        sparsity: share of the values that one L1 step moves.
    """
    del noise  # deterministic; taken so that every attack can be called in the same way
    step_size = _equal_steps(threat, steps, step_size)
    task = (model, x, y, threat, x)
    return ascend(*task, loss=get_loss(loss), steps=steps, step_size=step_size, sparsity=sparsity, name="i-fgsm")


@register(
    Attack(
        "mi-fgsm",
        summary="iterated FGSM with momentum: made to transfer from one model to another",
        threats=BALLS,
        reference="Dong et al., Boosting adversarial attacks with momentum, 2018",
    )
)
@torch.no_grad()
def mi_fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: Count = 10,
    step_size: NotNegative | None = None,
    decay: NotNegative = 1.0,
    loss: str | Loss = "ce",
    sparsity: Unit = 0.01,
) -> AttackResult:
    """Step along the sum of all gradients so far, each divided by its L1 norm; the sum fades by `decay` per step.

    Arguments as for `i-fgsm`. For Linf (sign) and L2 (unit length) the directions are the paper's.
    """
    del noise  # deterministic; taken so that every attack can be called in the same way
    step_size = _equal_steps(threat, steps, step_size)
    run = partial(ascend, model, x, y, threat, x, loss=get_loss(loss), steps=steps, step_size=step_size)
    return run(sparsity=sparsity, decay=decay, name="mi-fgsm")


def _equal_steps(threat: Threat, steps: int, step_size: float | None) -> float:
    """The given step size, else the one with which all steps together spend the budget."""
    return threat.budget / steps if step_size is None else step_size
