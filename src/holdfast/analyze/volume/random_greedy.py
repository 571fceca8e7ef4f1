"""Random greedy search: add Gaussian noise to all weights, keep it if the loss falls, halve it after many failures."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from holdfast.analyze.volume.family import CHUNK
from holdfast.analyze.volume.fitting import ANY, Bins, Fitting, Found
from holdfast.analyze.volume.local_search import Visit, follow
from holdfast.utils.options import Count, Inside, Positive

Measure = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From points (m, P) to their accuracies and losses, both (m,)."""


def random_greedy(
    fitting: Fitting,
    bins: Bins = ANY,
    *,
    sigma: Positive = 1.0,
    shrink: Inside = 0.5,
    failures: Count = 30_000,
    least: Positive = 1e-6,
    block: Count = 32,
    limit: Count = 1_000_000,
    start: Tensor | None = None,
    to_the_end: bool = False,
    seed: int = 0,
) -> Found:
    """Search from random weights; keep the first network on the way that fits with its loss in each bin.

    Args:
        sigma: first standard deviation of the noise.
        shrink: its factor after so many `failures` in a row.
        failures: candidates without a lower loss before the noise shrinks; a lower loss starts the count again.
        least: the search ends below this sigma.
        block: candidates that are compared at a time; the best is taken if it lowers the loss.
        limit: blocks at most.
        start: weights to start from, (P,); uniform on [-1, 1] unless given.
        to_the_end: go on although the bins are full.
    """
    point = fitting.family.draw(1, seed=seed, like=fitting.x)[0] if start is None else start
    how = {"sigma": sigma, "shrink": shrink, "least": least}
    path = greedy_path(
        lambda points: fitting.measure(points, chunk=CHUNK), point, **how, failures=failures, block=block, seed=seed
    )
    return follow(path, "random greedy search", bins, limit=limit, to_the_end=to_the_end)


@torch.no_grad()
def greedy_path(
    measure: Measure,
    point: Tensor,
    *,
    sigma: float = 1.0,
    shrink: float = 0.5,
    failures: int = 30_000,
    least: float = 1e-6,
    block: int = 32,
    seed: int = 0,
) -> Iterator[Visit]:
    """The points of a random greedy search on any loss, from `point` (P,) on; the loss falls strictly."""
    generator = torch.Generator(device=point.device).manual_seed(seed)
    accuracy, losses = measure(point[None])
    loss, fits, tried, failed = float(losses[0]), bool(accuracy[0] == 1), 1, 0
    yield Visit(point, loss, fits, sigma, tried, True)
    while sigma >= least:
        noise = torch.empty(block, len(point), dtype=point.dtype, device=point.device)
        points = noise.normal_(0, sigma, generator=generator) + point
        accuracy, losses = measure(points)
        tried += block
        best = int(losses.argmin())
        moved = float(losses[best]) < loss
        if moved:
            point, loss, fits, failed = points[best].clone(), float(losses[best]), bool(accuracy[best] == 1), 0
        else:
            failed += block
        if failed >= failures:
            sigma, failed = sigma * shrink, 0
        yield Visit(point, loss, fits, sigma, tried, moved)
