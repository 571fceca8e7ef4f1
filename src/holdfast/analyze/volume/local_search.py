"""What the local searches share: follow a path of falling losses and keep a network for each bin."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.analyze.volume.fitting import Bins, Found, bin_of, check_bins
from holdfast.utils.clock import over
from holdfast.utils.progress import progress_bars


@dataclass(frozen=True, eq=False)
class Visit:
    """Where a search stands after a step.

    Attributes:
        point: weights, (P,).
        loss: at the point.
        fits: whether all samples are classified right there.
        size: radius or sigma.
        tried: networks evaluated so far.
        moved: whether the step changed the point.
    """

    point: Tensor
    loss: float
    fits: bool
    size: float
    tried: int
    moved: bool


def follow(path: Iterator[Visit], name: str, bins: Bins, *, limit: int, to_the_end: bool) -> Found:
    """Follow a path until each bin has a network, until no bin can get one, or for `limit` steps."""
    check_bins(bins)
    began, kept, losses = time.perf_counter(), {}, []
    waits = torch.zeros(len(bins), dtype=torch.int64)
    accepted, visit = 0, None
    with progress_bars() as bars:
        bar = bars.add_task(name, total=limit)
        for count, visit in enumerate(path):
            if visit.moved:
                losses.append(visit.loss)
                accepted += visit.fits
                at = int(bin_of(torch.tensor(visit.loss, dtype=torch.float64), bins)) if visit.fits else -1
                if at >= 0 and at not in kept:
                    kept[at] = visit
                    waits[at] = visit.tried
            text = f"{name}: loss {visit.loss:.4f}, step {visit.size:.2g}, {len(kept)} of {len(bins)} bins filled"
            bars.update(bar, description=text, completed=count)
            # The loss only falls: below the lowest open bin nothing more can come.
            settled = all(i in kept or visit.loss <= low for i, (low, _) in enumerate(bins))
            if (settled and not to_the_end) or count >= limit or over():
                break
    if visit is None:
        raise AssertionError("a path begins with its first point")
    rows = [kept[i] for i in sorted(kept)]
    weights = torch.stack([v.point for v in rows]) if rows else visit.point.new_empty(0, len(visit.point))
    return Found(
        weights,
        torch.tensor(sorted(kept), dtype=torch.int64),
        torch.tensor([v.loss for v in rows], dtype=weights.dtype),
        (waits > 0).long(),
        waits,
        accepted,
        visit.tried,
        time.perf_counter() - began,
        visit.point,
        torch.tensor(losses, dtype=torch.float64),
    )
