"""MultiTargeted: PGD on the difference of two logits, one class after another."""

from functools import partial

from torch import Tensor

from holdfast.attacks.core.ascent import BALLS, ascend
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.losses import likely_targets, targeted_margin
from holdfast.attacks.core.stages import run_targets
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.utils.options import Count, NotNegative


@Attack(
    "multi-targeted",
    summary="PGD on z_t - z_y towards each other class t, the likeliest first",
    threats=BALLS,
    reference="Gowal et al., An alternative surrogate loss for PGD-based adversarial testing, 2019",
)
@on_task
def multi_targeted(
    task: Task,
    *,
    steps: Count = 40,
    step_size: NotNegative | None = None,
    restarts: Count = 1,
    targets: Count | None = None,
) -> AttackResult:
    """Run PGD on z_t - z_y for every class t other than y, highest clean logit first, each on the survivors so far.

    All targets of one restart begin at the same random point. The cost grows with the number of classes: for many,
    give `targets`.

    Args:
        steps: gradient steps of each run.
        step_size: in the threat's own unit; 2.5 * budget / steps if none is given.
        restarts: runs for each target; the first one included.
        targets: how many classes to aim at; all K - 1 if none is given.
    """
    model, x, y, threat, noise = task
    size = 2.5 * threat.budget / steps if step_size is None else step_size
    ranked = likely_targets(model(x), y, targets)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise, target: Tensor) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart))
        part = (model, x, y, threat, x_start)
        return ascend(*part, loss=targeted_margin, target=target, steps=steps, step_size=size, name="multi-targeted")

    runs = [(column, partial(run, restart)) for restart in range(restarts) for column in range(ranked.shape[1])]
    return run_targets(x, y, noise, ranked, runs)
