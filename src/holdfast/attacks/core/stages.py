"""Attacks in sequence: each stage works on what the ones before it left unbroken."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from holdfast.random import Noise
from holdfast.results import AttackResult
from holdfast.utils import clock

Stage = Callable[[Tensor, Tensor, Noise], AttackResult]
TargetedRun = Callable[[Tensor, Tensor, Noise, Tensor], AttackResult]


def run_stages(x: Tensor, y: Tensor, noise: Noise, stages: Sequence[Stage]) -> AttackResult:
    """Run `stages` one after another, each on the survivors of the earlier ones, and merge their results.

    A survivor keeps the point that the last stage returned for it: stages may maximise different losses. No stage is
    begun after the deadline.

    Args:
        x: inputs (B, ...).  y: labels (B,).  noise: one source for each input.
        stages: functions (x, y, noise) -> AttackResult on any subset of the batch.
    """
    merged = untouched(x)
    for stage in stages:
        alive = ~merged.success
        if clock.over() or not bool(alive.any()):
            break
        merged = _merge(merged, alive, x, y, noise, stage)
    return merged


def run_part(where: Tensor, x: Tensor, y: Tensor, noise: Noise, stage: Stage) -> AttackResult:
    """Run a stage on the inputs `where` (B,) bool is true; return the others untouched."""
    return _merge(untouched(x), where, x, y, noise, stage) if bool(where.any()) else untouched(x)


def _merge(merged: AttackResult, where: Tensor, x: Tensor, y: Tensor, noise: Noise, stage: Stage) -> AttackResult:
    """`merged`, overwritten with the results of the stage on the inputs `where`; costs add up."""
    rows, by = where.nonzero()[:, 0], list(merged.by)
    result = stage(x[rows], y[rows], noise[rows])
    merged.x_adv[rows], merged.success[rows] = result.x_adv, result.success
    merged.gradients[rows] += result.gradients
    merged.queries[rows] += result.queries
    for i, name in zip(rows.tolist(), result.by, strict=True):
        by[i] = name
    return replace(merged, by=tuple(by))


def run_restarts(x: Tensor, y: Tensor, noise: Noise, restarts: int, run: Callable[..., AttackResult]) -> AttackResult:
    """Call `run(restart, x, y, noise)` for each restart on the survivors of the earlier ones."""
    return run_stages(x, y, noise, [partial(run, restart) for restart in range(restarts)])


def run_targets(
    x: Tensor, y: Tensor, noise: Noise, targets: Tensor, runs: Sequence[tuple[int, TargetedRun]]
) -> AttackResult:
    """Run one after another on the survivors of the earlier ones, each with its column of `targets`.

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


def untouched(x: Tensor) -> AttackResult:
    """The result of no attack at all."""
    count = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    success = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    return AttackResult(x.clone(), success, ("",) * len(x), count, count.clone())
