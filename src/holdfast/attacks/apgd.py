"""Auto-PGD on the cross-entropy, on the difference of logits ratio, on both in turn, and towards other classes."""

from functools import partial
from typing import Any

from torch import Tensor

from holdfast.attacks.core.ascent import BALLS
from holdfast.attacks.core.auto_pgd import auto_pgd
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.losses import Loss, cross_entropy, dlr, likely_targets, targeted_dlr
from holdfast.attacks.core.stages import run_restarts, run_stages, run_targets
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.utils.options import Count

_REFERENCE = (
    "Croce and Hein, Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free "
    "attacks, 2020"
)


def _untargeted(task: Task, restarts: int, **options: Any) -> AttackResult:
    model, x, y, threat, noise = task

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart))
        return auto_pgd(model, x, y, threat, x_start, **options)

    return run_restarts(x, y, noise, restarts, run)


@Attack("apgd-ce", summary="Auto-PGD on the cross-entropy: sets its own step size", threats=BALLS, reference=_REFERENCE)
@on_task
def apgd_ce(task: Task, *, steps: Count = 100, restarts: Count = 1, samples: Count = 1) -> AttackResult:
    """Run Auto-PGD on the cross-entropy, from a random point; restarts run on the survivors only.

    Args:
        steps: gradient steps of each run.
        restarts: runs in all; the first one included.
        samples: passes averaged at each point, for models that draw random numbers; AutoAttack takes 20.
    """
    return _untargeted(task, restarts, loss=cross_entropy, steps=steps, samples=samples, name="apgd-ce")


@Attack(
    "apgd-dlr",
    summary="Auto-PGD on the difference of logits ratio, which no scale of the logits can mask",
    threats=BALLS,
    reference=_REFERENCE,
)
@on_task
def apgd_dlr(task: Task, *, steps: Count = 100, restarts: Count = 1, samples: Count = 1) -> AttackResult:
    """Run Auto-PGD on the difference of logits ratio (`losses.dlr`); arguments as for `apgd-ce`."""
    return _untargeted(task, restarts, loss=dlr, steps=steps, samples=samples, name="apgd-dlr")


@Attack(
    "apgd-ce-dlr",
    summary="APGD-CE, then APGD-DLR on what is left: the pair of some tables, weaker than AutoAttack",
    threats=BALLS,
    reference=_REFERENCE,
)
@on_task
def apgd_ce_dlr(task: Task, *, steps: Count = 100, restarts: Count = 1, samples: Count = 1) -> AttackResult:
    """Run `apgd-ce`, and `apgd-dlr` on the survivors; arguments as for `apgd-ce`. `by` says which of them it was.

    Wang et al., "Improving robust generalization by direct PAC-Bayesian bound minimization", 2023, report this pair
    under the name of AutoAttack, which has four members: figures of one must not stand beside figures of the other.
    """
    model, x, y, threat, noise = task

    def run(loss: Loss, name: str, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        left = Task(model, x, y, threat, noise)
        return _untargeted(left, restarts, loss=loss, steps=steps, samples=samples, name=name)

    return run_stages(x, y, noise, [partial(run, cross_entropy, "apgd-ce"), partial(run, dlr, "apgd-dlr")])


@Attack(
    "apgd-t",
    summary="Auto-PGD on the targeted difference of logits ratio, one likely class after another",
    threats=BALLS,
    reference=_REFERENCE,
)
@on_task
def apgd_t(
    task: Task, *, steps: Count = 100, restarts: Count = 1, targets: Count = 9, samples: Count = 1
) -> AttackResult:
    """Run Auto-PGD towards each of the `targets` classes with the highest clean logits, each on the survivors so far.

    Arguments as for `apgd-ce`; `restarts` runs for each target. K classes have at most K - 1 targets.
    """
    model, x, y, threat, noise = task
    ranked = likely_targets(model(x), y, targets)

    def run(number: int, x: Tensor, y: Tensor, noise: Noise, target: Tensor) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(number))
        how: dict[str, Any] = {"loss": targeted_dlr, "target": target, "name": "apgd-t"}
        return auto_pgd(model, x, y, threat, x_start, steps=steps, samples=samples, **how)

    numbers = range(ranked.shape[1] * restarts)
    return run_targets(x, y, noise, ranked, [(n // restarts, partial(run, n)) for n in numbers])
