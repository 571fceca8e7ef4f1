"""MultiTargeted: PGD on the difference of two logits, one class after another."""

from functools import partial

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS, ascend
from holdfast.attacks.core.losses import likely_targets, targeted_margin
from holdfast.attacks.core.stages import run_targets
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Threat
from holdfast.utils.options import Count, NotNegative


@register(
    Attack(
        "multi-targeted",
        summary="PGD on z_t - z_y towards each other class t, the likeliest first",
        threats=BALLS,
        reference="Gowal et al., An alternative surrogate loss for PGD-based adversarial testing, 2019",
    )
)
@torch.no_grad()
def multi_targeted(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: Count = 40,
    step_size: NotNegative | None = None,
    restarts: Count = 1,
    targets: Count | None = None,
) -> AttackResult:
    """Run PGD on z_t - z_y for every class t other than y, highest clean logit first, each on the survivors so far.

    All targets of one restart begin at the same random point. The cost grows with the number of classes: for many,
    give `targets`.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball or a Box.
        noise: source of the random starts; seed 0 for inputs 0 ... B-1 if none is given.
        steps: gradient steps of each run.
        step_size: in the threat's own unit; 2.5 * budget / steps if none is given.
        restarts: runs for each target; the first one included.
        targets: how many classes to aim at; all K - 1 if none is given.
    """
    noise = noise or Noise.for_batch(0, len(x), x.device)
    size = 2.5 * threat.budget / steps if step_size is None else step_size
    ranked = likely_targets(model(x), y, targets)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise, target: Tensor) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart))
        task = (model, x, y, threat, x_start)
        return ascend(*task, loss=targeted_margin, target=target, steps=steps, step_size=size, name="multi-targeted")

    runs = [(column, partial(run, restart)) for restart in range(restarts) for column in range(ranked.shape[1])]
    return run_targets(x, y, noise, ranked, runs)
