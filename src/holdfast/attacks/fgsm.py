"""FGSM and its descendants: one gradient step, with a random step first, many steps, momentum.

All are weaker than `pgd`; they are here to compare with papers.
"""

from functools import partial

from holdfast.attacks.core.ascent import BALLS, ascend, steepest
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.losses import Loss, get_loss
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Threat
from holdfast.utils.options import Count, NotNegative, Unit


@Attack(
    "fgsm",
    summary="one gradient step of the full budget",
    threats=BALLS,
    reference="Goodfellow, Shlens and Szegedy, Explaining and harnessing adversarial examples, 2015",
)
@on_task
def fgsm(task: Task, *, loss: str | Loss = "ce") -> AttackResult:
    """Return x + budget * steepest(gradient), projected: exact on linear models, weak elsewhere. Prefer `pgd`.

    For L1 all of the budget goes to the one value with the largest gradient.
    """
    budget = task.threat.budget
    return ascend(*task[:4], task.x, steps=1, step_size=budget, loss=get_loss(loss), sparsity=0.0, name="fgsm")


@Attack(
    "r-fgsm",
    summary="a random step, then one gradient step with the rest of the budget",
    threats=BALLS,
    reference="Tramer et al., Ensemble adversarial training: attacks and defenses, 2018",
)
@on_task
def r_fgsm(task: Task, *, loss: str | Loss = "ce", random_share: Unit = 0.5) -> AttackResult:
    """R+FGSM: x' = x + alpha * steepest(normal noise), then x' + (budget - alpha) * steepest(gradient at x').

    It leaves the region around x where a masked gradient says nothing. Linf: sign steps, as in the paper; L2: steps in
    the direction itself; L1: each of the two steps moves one value.

    Args:
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.
        random_share: alpha / budget.
    """
    x, threat = task.x, task.threat
    alpha = random_share * threat.budget
    direction = steepest(threat, task.noise.normal(x.shape[1:], x.dtype), x, 0.0)
    x_start = threat.project(x + alpha * direction, x)
    rest = threat.budget - alpha
    return ascend(*task[:4], x_start, steps=1, step_size=rest, loss=get_loss(loss), sparsity=0.0, name="r-fgsm")


@Attack(
    "i-fgsm",
    summary="FGSM in several small steps from the input itself",
    threats=BALLS,
    reference="Kurakin, Goodfellow and Bengio, Adversarial examples in the physical world, 2017",
)
@on_task
def i_fgsm(
    task: Task,
    *,
    steps: Count = 10,
    step_size: NotNegative | None = None,
    loss: str | Loss = "ce",
    sparsity: Unit = 0.01,
) -> AttackResult:
    """x_adv <- project(x_adv + step_size * steepest(gradient)), from x; also known as the basic iterative method.

    The paper takes steps of one grey level, min(levels + 4, 1.25 * levels) of them, which are 10 for a budget of 8/255.
    Here 10 is the default for every budget, with steps that add up to it: the rule has no meaning for L2 and L1.

    Args:
        step_size: in the threat's own unit; budget / steps if none is given.
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.
        sparsity: share of the values that one L1 step moves.
    """
    run = partial(ascend, *task[:4], task.x, loss=get_loss(loss), steps=steps, sparsity=sparsity)
    return run(step_size=_equal_steps(task.threat, steps, step_size), name="i-fgsm")


@Attack(
    "mi-fgsm",
    summary="iterated FGSM with momentum: made to transfer from one model to another",
    threats=BALLS,
    reference="Dong et al., Boosting adversarial attacks with momentum, 2018",
)
@on_task
def mi_fgsm(
    task: Task,
    *,
    steps: Count = 10,
    step_size: NotNegative | None = None,
    decay: NotNegative = 1.0,
    loss: str | Loss = "ce",
    sparsity: Unit = 0.01,
) -> AttackResult:
    """Step along the sum of all gradients so far, each divided by its L1 norm; the sum fades by `decay` per step.

    Arguments as for `i-fgsm`. For Linf (sign) and L2 (unit length) the directions are the paper's.
    """
    run = partial(ascend, *task[:4], task.x, loss=get_loss(loss), steps=steps, sparsity=sparsity, decay=decay)
    return run(step_size=_equal_steps(task.threat, steps, step_size), name="mi-fgsm")


def _equal_steps(threat: Threat, steps: int, step_size: float | None) -> float:
    """The given step size, else the one with which all steps together spend the budget."""
    return threat.budget / steps if step_size is None else step_size
