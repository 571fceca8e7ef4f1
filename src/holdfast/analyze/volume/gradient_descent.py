"""Stochastic gradient descent on many networks at once, each stopped at the same normalised loss; the comparison."""

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from holdfast.analyze.volume.family import Family
from holdfast.analyze.volume.fitting import ANY, Bins, Fitting, Found, check_bins, mean_loss
from holdfast.random import Noise
from holdfast.utils.clock import over
from holdfast.utils.options import Count, Fraction, Positive
from holdfast.utils.progress import progress_bars

Start = Literal["uniform", "default"]
After = Callable[[Tensor, int], bool]
"""Called with the weights (M, P) and the number of steps; True ends the descent."""


def gradient_descent(
    fitting: Fitting,
    bins: Bins = ANY,
    *,
    epochs: Count = 30,
    lr: Positive = 1e-3,
    momentum: Fraction = 0.0,
    batch_size: Count = 2,
    runs: Count = 32,
    start: Start = "uniform",
    seed: int = 0,
) -> Found:
    """Descend on the raw loss from several starts; keep for each bin the first of the runs that stop in it.

    For a bin (low, high] a run stops at the first step after which its normalised loss is at most high and all samples
    are classified right; it counts if the loss is above low. The first run is the first by number, not by time, which
    would prefer quick ones.

    Args:
        epochs: passes over the samples.  lr, momentum: of SGD.  batch_size: samples of each step.
        runs: networks that descend side by side.
        start: "uniform" on [-1, 1], as guess and check draws, or "default", as the layers initialise themselves.
    """
    check_bins(bins)
    began, family = time.perf_counter(), fitting.family
    draw = family.draw if start == "uniform" else family.start
    weights = draw(runs, seed=seed, like=fitting.x)
    stopped = torch.zeros(runs, len(bins), dtype=torch.bool)
    fitted = torch.zeros(runs, dtype=torch.bool)
    kept: dict[int, tuple[int, Tensor, float, int]] = {}  # bin: run, weights, loss, networks tried

    def after(now: Tensor, steps: int) -> bool:
        accuracy, loss = (values.cpu() for values in fitting.measure(now))
        fitted.logical_or_(accuracy == 1)
        for i, (low, high) in enumerate(bins):
            fresh = (accuracy == 1) & (loss <= high) & ~stopped[:, i]
            stopped[:, i] |= fresh
            for run in (fresh & (loss > low)).nonzero()[:1, 0].tolist():
                if i not in kept or run < kept[i][0]:
                    kept[i] = run, now[run].clone(), float(loss[run]), (steps + 1) * runs
        return all(bool(stopped[: kept[i][0] if i in kept else runs, i].all()) for i in range(len(bins)))

    how = {"epochs": epochs, "lr": lr, "momentum": momentum, "batch_size": batch_size}
    last, steps = descend(family, weights, fitting.x, fitting.y, **how, seed=seed, after=after)  # type: ignore[arg-type]
    waits = torch.tensor([kept[i][3] if i in kept else 0 for i in range(len(bins))])
    rows = [kept[i] for i in sorted(kept)]
    return Found(
        torch.stack([row[1] for row in rows]) if rows else weights[:0],
        torch.tensor(sorted(kept), dtype=torch.int64),
        torch.tensor([row[2] for row in rows], dtype=weights.dtype),
        (waits > 0).long(),
        waits,
        int(fitted.sum()),
        (steps + 1) * runs,
        time.perf_counter() - began,
        last[0],
    )


def descend(
    family: Family,
    weights: Tensor,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    lr: float,
    batch_size: int,
    momentum: float = 0.0,
    adam: bool = False,
    seed: int = 0,
    after: After | None = None,
) -> tuple[Tensor, int]:
    """Train the networks `weights` (M, P) on one set of samples in the same order; return them and the steps made.

    Networks do not see each other: each gets the gradient of its own loss. `after` is also called before the first
    step, with 0.
    """
    leaf = weights.detach().clone().requires_grad_(True)
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam([leaf], lr=lr) if adam else torch.optim.SGD([leaf], lr=lr, momentum=momentum)
    )
    steps = 0
    with torch.no_grad():
        if after is not None and after(leaf.detach(), 0):
            return leaf.detach(), 0
    with progress_bars() as bars:
        bar = bars.add_task("gradient descent", total=epochs)
        for epoch in range(epochs):
            order = Noise.for_batch(seed, len(x), x.device).fork(epoch).bits(()).argsort()
            for rows in order.split(batch_size):
                optimizer.zero_grad()
                mean_loss(family.logits(leaf, x[rows], chunk=len(leaf)), y[rows]).sum().backward()
                optimizer.step()
                steps += 1
                with torch.no_grad():
                    if (after is not None and after(leaf.detach(), steps)) or over():
                        return leaf.detach(), steps
            bars.update(bar, completed=epoch + 1)
    return leaf.detach(), steps
