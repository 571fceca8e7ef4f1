"""Attacks in sequence: each stage works on what the ones before it left unbroken."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.random import Noise
from holdfast.results import AttackResult

Stage = Callable[[Tensor, Tensor, Noise], AttackResult]


def run_stages(x: Tensor, y: Tensor, noise: Noise, stages: Sequence[Stage]) -> AttackResult:
    """Runs `stages` one after another, each on the survivors of those before it, and merges their results.

    A survivor keeps the point that the last stage returned for it: stages may maximise different losses.

    Args:
        x: inputs (B, ...).  y: labels (B,).  noise: one source for each input.
        stages: functions (x, y, noise) -> AttackResult on any subset of the batch.
    """
    merged = untouched(x)
    x_adv, success, by = merged.x_adv, merged.success, list(merged.by)
    gradients, queries = merged.gradients, merged.queries
    for stage in stages:
        alive = (~success).nonzero()[:, 0]
        if len(alive) == 0:
            break
        result = stage(x[alive], y[alive], noise[alive])
        x_adv[alive] = result.x_adv
        success[alive] = result.success
        gradients[alive] += result.gradients
        queries[alive] += result.queries
        for i, name in zip(alive.tolist(), result.by, strict=True):
            by[i] = name
    return AttackResult(x_adv, success, tuple(by), gradients, queries)


def run_part(where: Tensor, x: Tensor, y: Tensor, noise: Noise, stage: Stage) -> AttackResult:
    """Runs a stage on the inputs `where` (B,) bool is true; the others come back untouched."""
    merged, rows = untouched(x), where.nonzero()[:, 0]
    if len(rows) == 0:
        return merged
    result = stage(x[rows], y[rows], noise[rows])
    by = list(merged.by)
    for i, name in zip(rows.tolist(), result.by, strict=True):
        by[i] = name
    for field in ("x_adv", "success", "gradients", "queries"):
        getattr(merged, field)[rows] = getattr(result, field)
    return replace(merged, by=tuple(by))


def untouched(x: Tensor) -> AttackResult:
    """The result of no attack at all."""
    count = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    success = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    return AttackResult(x.clone(), success, ("",) * len(x), count, count.clone())


def group_size(count: int) -> int:
    """Size of the groups in which inputs leave a batch of `count`: a power of two, a sixteenth to an eighth of it."""
    return 1 << max(0, count.bit_length() - 4)


def survivors(done: Tensor, group: int) -> Tensor | None:
    """Rows to go on with, those still undone first in their order; None where it does not pay to shrink the batch.

    Inputs leave in groups, so that few batch sizes occur: the backend builds new kernels for each new size, which costs
    more than to carry some inputs along. Those that are carried along must neither be changed nor counted.

    Args:
        done: (B,) bool.  group: from `group_size` of the batch at the start.
    """
    size = group * math.ceil((len(done) - int(done.sum())) / group)
    return done.byte().argsort(stable=True)[:size] if size < len(done) else None
