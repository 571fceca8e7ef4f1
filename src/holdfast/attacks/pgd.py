"""PGD: projected gradient ascent with random restarts."""

from torch import Tensor

from holdfast.attacks.core.ascent import BALLS, ascend
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.losses import Loss, get_loss
from holdfast.attacks.core.stages import run_restarts
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.utils.options import Count, NotNegative, Unit


@Attack(
    "pgd",
    summary="projected gradient ascent with random restarts",
    threats=BALLS,
    reference="Madry et al., Towards deep learning models resistant to adversarial attacks, 2018",
)
@on_task
def pgd(
    task: Task,
    *,
    steps: Count = 40,
    step_size: NotNegative | None = None,
    restarts: Count = 1,
    loss: str | Loss = "ce",
    random_start: bool = True,
    sparsity: Unit = 0.01,
) -> AttackResult:
    """Run projected gradient ascent; an input leaves the batch once broken, restarts run on the survivors only.

    Per step: x_adv <- project(x_adv + step_size * steepest(gradient)).

    Args:
        steps: gradient steps of each run.
        step_size: in the threat's own unit; 2.5 * budget / steps if none is given.
        restarts: runs in all; the first one included.
        loss: "ce", "margin" or a function (logits, y) -> (B,) to maximise.
        random_start: start at a random point of the set instead of x.
        sparsity: share of the values that one L1 step moves.
    """
    model, x, y, threat, noise = task
    step_size = 2.5 * threat.budget / steps if step_size is None else step_size

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart)) if random_start else x
        part = (model, x, y, threat, x_start)
        return ascend(*part, steps=steps, step_size=step_size, loss=get_loss(loss), sparsity=sparsity, name="pgd")

    return run_restarts(x, y, noise, restarts, run)
