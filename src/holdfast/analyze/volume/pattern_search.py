"""Pattern search: move one weight at a time by a fixed step, halve the step when no move helps."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from holdfast.analyze.volume.fitting import ANY, Bins, Fitting, Found
from holdfast.analyze.volume.local_search import Visit, follow
from holdfast.analyze.volume.moves import Around, Neighbours
from holdfast.utils.options import Count, Inside, Positive


def pattern_search(
    fitting: Fitting,
    bins: Bins = ANY,
    *,
    radius: Positive = 1.0,
    shrink: Inside = 0.5,
    least: Positive = 1e-6,
    block: Count = 128,
    limit: Count = 100_000,
    start: Tensor | None = None,
    to_the_end: bool = False,
    seed: int = 0,
) -> Found:
    """Search from random weights; keep the first network on the way that fits with its loss in each bin.

    All pairs of a weight and a sign are tried in random order; the first block with a move that lowers the normalised
    loss ends the pass, and its best move is made. With block=1 this is the published search; larger blocks are the
    published code's, and lower the loss in fewer steps (Chiang et al., "Loss landscapes are all you need", 2023).

    Args:
        radius: first step; weights start in [-1, 1].
        shrink: factor of the radius after a pass in which no move helped.
        least: the search ends below this radius.
        block: moves that are compared at a time.
        limit: steps at most; a step is a move that is made, or a radius that shrinks.
        start: weights to start from, (P,); uniform on [-1, 1] unless given.
        to_the_end: make all steps although the bins are full.
    """
    point = fitting.family.draw(1, seed=seed, like=fitting.x)[0] if start is None else start
    path = pattern_path(
        lambda at: Neighbours(fitting, at), point, radius=radius, shrink=shrink, least=least, block=block, seed=seed
    )
    return follow(path, "pattern search", bins, limit=limit, to_the_end=to_the_end)


@torch.no_grad()
def pattern_path(
    around: Callable[[Tensor], Around],
    point: Tensor,
    *,
    radius: float = 1.0,
    shrink: float = 0.5,
    least: float = 1e-6,
    block: int = 128,
    seed: int = 0,
) -> Iterator[Visit]:
    """The points of a pattern search on any loss, from `point` (P,) on; the loss falls strictly with each move."""
    generator = torch.Generator(device=point.device).manual_seed(seed)
    here, tried = around(point), 1
    yield Visit(point, here.loss, here.fits, radius, tried, True)
    while radius >= least:
        order = torch.randperm(2 * len(point), generator=generator, device=point.device)
        moved = False
        for pairs in order.split(block):
            index, step = pairs // 2, (1.0 - 2.0 * (pairs % 2)) * radius
            losses = here.losses(index, step.to(point))
            tried += len(pairs)
            best = int(losses.argmin())
            if not float(losses[best]) < here.loss:
                continue
            there = point.clone()
            there[index[best]] += step[best]
            next_one = around(there)
            if next_one.loss < here.loss:  # the neighbour's loss was rounded in another order
                point, here, moved = there, next_one, True
                break
        if not moved:
            radius *= shrink
        yield Visit(point, here.loss, here.fits, radius, tried, moved)
