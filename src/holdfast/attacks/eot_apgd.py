"""Auto-PGD on the gradient averaged over draws: the step size sets itself, where EOT-PGD leaves it to the caller."""

from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import steepest
from holdfast.attacks.core.auto_pgd import checkpoints, halves
from holdfast.attacks.core.chance import log_mean_softmax, seeded
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.gradients import frozen
from holdfast.attacks.core.losses import Loss, cross_entropy, dlr, margin
from holdfast.attacks.core.stages import run_restarts
from holdfast.attacks.core.survivors import Survivors
from holdfast.attacks.eot import Average, Sampling, draw_seed, expected_gradient
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Threat
from holdfast.utils import clock
from holdfast.utils.options import Count

LOSSES: dict[str, Loss] = {"ce": cross_entropy, "dlr": dlr, "margin": margin}
MOMENTUM, RHO = 0.75, 0.75  # of Auto-PGD (Croce and Hein, 2020)


def _ascend(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, x_start: Tensor, sampling: Sampling, steps: int
) -> Tensor:
    """The point of largest mean loss on the way, shape of x; no input leaves early.

    A single look at a random model may be wrong, so that a misclassified iterate is no reason to stop.
    """
    wide = (-1, *[1] * (x.ndim - 1))
    x_adv = x_old = best_x = x_start
    best, best_before = (torch.full_like(x.flatten(1)[:, 0], -torch.inf) for _ in range(2))
    previous = torch.full_like(best, torch.inf)  # so that the first loss is no rise
    best_gradient, rises = torch.zeros_like(x), torch.zeros_like(y)
    size, halved = torch.full_like(best, 2 * threat.budget), torch.ones_like(y, dtype=torch.bool)
    checks, last = checkpoints(steps), 0
    for step in range(steps + 1):
        gradient, value, _ = expected_gradient(model, x_adv, y, sampling)
        better = value > best
        best = torch.where(better, value, best)
        best_x, best_gradient = (
            torch.where(better.view(wide), new, old) for new, old in ((x_adv, best_x), (gradient, best_gradient))
        )
        rises, previous = rises + (value > previous), value
        if step == steps or clock.over():
            break
        if step in checks:
            halved = halves(rises, step - last, best, best_before, halved, RHO)
            size = torch.where(halved, size / 2, size)
            x_adv, gradient = (
                torch.where(halved.view(wide), old, new) for new, old in ((x_adv, best_x), (gradient, best_gradient))
            )
            best_before, rises, last = best, torch.zeros_like(rises), step
        z = threat.project(x_adv + size.view(wide) * steepest(threat, gradient, x_adv, 0.0), x)
        if step > 0:
            z = threat.project(x_adv + MOMENTUM * (z - x_adv) + (1 - MOMENTUM) * (x_adv - x_old), x)
        x_adv, x_old = z, x_adv
    return best_x


@Attack(
    "eot-apgd",
    summary="Auto-PGD on the gradient averaged over draws of a random model; takes all of its steps",
    threats=("linf", "l2", "box"),
    reference="Croce and Hein, Reliable evaluation of adversarial robustness with an ensemble of diverse "
    "parameter-free attacks, 2020; Athalye et al., Synthesizing robust adversarial examples, 2018",
    stochastic=True,
)
@on_task
def eot_apgd(
    task: Task,
    *,
    samples: Count = 20,
    steps: Count = 100,
    restarts: Count = 1,
    loss: Literal["ce", "dlr", "margin"] = "ce",
    average: Average = "gradients",
    votes: Count = 20,
    one_pass: bool = False,
) -> AttackResult:
    """Run Auto-PGD on the mean loss over `samples` fresh draws; fresh `votes` judge the point of largest mean loss.

    Unlike `autoattack` with version "rand" it goes on behind the first misclassified iterate, which on a random model
    is often luck. The first run starts at x, the others at random points of the set. Other options as for `eot-pgd`.

    Args:
        loss: cross-entropy, difference of logits ratio, or margin, each averaged over the draws.
    """
    model, x, y, threat, noise = task
    if loss != "ce" and average == "outputs":
        raise InputError(f"average='outputs' is for loss='ce', got loss='{loss}'; take average='gradients'")
    sampling = Sampling(samples, average, one_pass, votes, LOSSES[loss])

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart)) if restart else x
        with seeded(draw_seed(noise, restart), x.device):
            x_adv = _ascend(model, x, y, threat, x_start, sampling, steps)
            log_p = log_mean_softmax(model, x_adv, votes)
        s = Survivors(x, y)
        s.count(gradients=samples * (steps + 1), queries=samples * (steps + 1) + votes)
        s.keep(x_adv, margin(log_p, y), log_p.argmax(1) != y)
        return s.result("eot-apgd")

    with frozen(model):
        return run_restarts(x, y, noise, restarts, run)
