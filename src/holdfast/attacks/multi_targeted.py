"""One class after another: what all targeted attacks share, and PGD on the difference of two logits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from holdfast.attacks.core.losses import likely_targets, targeted_margin
from holdfast.attacks.core.stages import Stage, run_stages
from holdfast.attacks.pgd import BALLS, ascend
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Threat

TargetedRun = Callable[[Tensor, Tensor, Noise, Tensor], AttackResult]


def run_targets(
    x: Tensor, y: Tensor, noise: Noise, targets: Tensor, runs: Sequence[tuple[int, TargetedRun]]
) -> AttackResult:
    """Runs one after another, each on the survivors of those before it, and each with its column of `targets`.

    Args:
        x: inputs (B, ...).  y: labels (B,).  noise: one source for each input.
        targets: (B, T) from `likely_targets`; the look at each input that they took is counted here.
        runs: pairs of a column and a function (x, y, noise, target) -> AttackResult.
    """

    def stage(column: int, run: TargetedRun) -> Stage:
        # Positions ride along as the index of a second noise: they say which targets belong to the survivors.
        return lambda x, y, at: run(x, y, noise[at.index], targets[at.index, column])

    merged = run_stages(x, y, Noise.for_batch(0, len(x), x.device), [stage(*run) for run in runs])
    return replace(merged, queries=merged.queries + 1)


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
    steps: int = 40,
    step_size: float | None = None,
    restarts: int = 1,
    targets: int | None = None,
) -> AttackResult:
    """PGD on z_t - z_y for every class t other than y, ordered by the clean logits, on the survivors of those before.

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
    if steps < 1 or restarts < 1 or (targets is not None and targets < 1):
        raise InputError(f"steps, restarts and targets must be at least 1, got {steps}, {restarts} and {targets}")
    noise = noise or Noise.for_batch(0, len(x), x.device)
    size = 2.5 * threat.budget / steps if step_size is None else step_size
    ranked = likely_targets(model(x), y, targets)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise, target: Tensor) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart))
        task = (model, x, y, threat, x_start)
        return ascend(*task, loss=targeted_margin, target=target, steps=steps, step_size=size, name="multi-targeted")

    runs = [(column, partial(run, restart)) for restart in range(restarts) for column in range(ranked.shape[1])]
    return run_targets(x, y, noise, ranked, runs)
