"""PGD: projected gradient ascent with random restarts."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS, ascend
from holdfast.attacks.core.losses import Loss, get_loss
from holdfast.attacks.core.stages import run_restarts
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Threat
from holdfast.utils.options import Count, NotNegative, Unit


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
    step_size = 2.5 * threat.budget / steps if step_size is None else step_size
    noise = noise or Noise.for_batch(0, len(x), x.device)
    loss_function = get_loss(loss)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart)) if random_start else x
        task = (model, x, y, threat, x_start)
        return ascend(*task, steps=steps, step_size=step_size, loss=loss_function, sparsity=sparsity, name="pgd")

    return run_restarts(x, y, noise, restarts, run)
