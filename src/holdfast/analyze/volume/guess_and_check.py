"""Guess and check: draw weights uniformly until a network fits. Its only bias is volume.

A set of networks is found with a probability proportional to its volume in [-width, width]^P (Chiang et al., "Loss
landscapes are all you need", 2023). The loss is looked at only where all samples are classified right.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.analyze.volume.family import CHUNK, block_seed
from holdfast.analyze.volume.fitting import ANY, Bins, Fitting, Found, bin_of, check_bins
from holdfast.analyze.volume.volume_estimate import Volume, volume
from holdfast.utils.clock import over
from holdfast.utils.options import Count, Positive
from holdfast.utils.progress import progress_bars

Watch = Callable[[Found], None]


@dataclass(frozen=True, eq=False)
class _Accepted:
    """Networks of one block that fit: number in the block, weights and loss."""

    number: Tensor
    weights: Tensor
    loss: Tensor


@torch.no_grad()
def guess_and_check(
    fitting: Fitting,
    bins: Bins = ANY,
    *,
    limit: Count = 1_000_000,
    each: Count = 1,
    keep: Count | None = None,
    stop: bool = True,
    width: Positive = 1.0,
    block: Count = 256,
    chunk: Count = CHUNK,
    seed: int = 0,
    begin: Found | None = None,
    watch: Watch | None = None,
) -> Found:
    """Guess until each bin has `each` networks, or `limit` guesses are made, or the deadline is over.

    Guesses come in blocks with random numbers of their own: a search that goes on from an earlier result gives the same
    networks as one that was never interrupted. Samples are looked at in groups of 2, 2, 4, 8, ...; a network that
    fails on one is dropped at once, which changes nothing but the time.

    Args:
        limit: guesses at most, rounded up to whole blocks.
        each: networks that each bin needs.
        keep: networks whose weights are kept for each bin; `each` unless given.
        stop: stop when every bin has its networks; False makes all guesses, for a volume with a fixed N.
        width: weights are drawn from [-width, width].
        block: guesses that share a seed; part of what `seed` fixes.
        chunk: networks evaluated at a time.
        begin: an earlier result with the same arguments, to go on from.
        watch: called with the result so far after each block, such as to save it.
    """
    check_bins(bins)
    found = begin or _nothing(fitting, len(bins))
    began, spent = time.perf_counter(), found.seconds
    with progress_bars() as bars:
        bar = bars.add_task("guess and check", total=limit)
        while found.tried < limit and not (stop and bool((found.hits >= each).all())) and not over():
            drawn = fitting.family.draw(block, seed=block_seed(seed, found.tried // block), width=width, like=fitting.x)
            seen = _fits(fitting, drawn, chunk)
            found = _collect(found, seen, bins, block, each, each if keep is None else keep)
            found = replace(found, seconds=spent + time.perf_counter() - began)
            text = f"guess and check: {found.accepted / found.tried:.1e} fit, {_filled(found, each)} bins filled"
            bars.update(bar, description=text, completed=found.tried, total=_expected(found, each, limit, stop))
            if watch is not None:
                watch(found)
    return found


def volumes(found: Found, *, each: int | None = 1) -> list[Volume]:
    """The volume of each bin.

    Args:
        found: what `guess_and_check` gave.
        each: the hits at which a bin was full, as in that call; what came later is not counted for it. None if all
            guesses were made whatever they hit (stop=False).
    """
    return [
        volume(each, wait, until=True) if wait and each is not None else volume(hits, found.tried)
        for hits, wait in zip(found.hits.tolist(), found.waits.tolist(), strict=True)
    ]


def unreached(found: Found, bins: Bins, *, each: int = 1) -> list[str]:
    """A sentence for each bin with fewer than `each` networks: the acceptance so far, and the time it would take."""
    rate = found.tried / max(found.seconds, 1e-9)
    lines = []
    for (low, high), hits in zip(bins, found.hits.tolist(), strict=True):
        if hits >= each:
            continue
        share = volume(hits, found.tried)
        seconds = each / (share.share if hits else share.high) / rate
        longer = f"{'about' if hits else 'more than'} {f'{seconds:,.0f}' if seconds >= 10 else f'{seconds:.2g}'} s"
        lines.append(
            f"loss ({low:g}, {high:g}]: {hits} of {each} networks in {found.tried:,} guesses, of which "
            f"{found.accepted:,} fit all samples. Its volume is at most {share.high:.1e}; at {rate:,.0f} guesses a "
            f"second it takes {longer}"
        )
    return lines


def _nothing(fitting: Fitting, bins: int) -> Found:
    none = torch.zeros(bins, dtype=torch.int64)
    weights = fitting.x.new_empty(0, fitting.family.size)
    return Found(weights, none[:0], weights[:, :0].sum(1), none, none.clone(), 0, 0, 0.0)


def _fits(fitting: Fitting, weights: Tensor, chunk: int) -> _Accepted:
    """The networks that classify all samples right, samples of all classes in turn."""
    order = _in_turn(fitting.y)
    left, start, size = torch.arange(len(weights), device=weights.device), 0, 2
    while start < len(order) and len(left):
        rows = order[start : start + size]
        group = weights if len(left) == len(weights) else weights[left]
        right = fitting.family.logits(group, fitting.x[rows], chunk=chunk).argmax(2) == fitting.y[rows]
        left, start, size = left[right.all(1)], start + size, start + size
    kept = weights[left]
    if not len(left):
        return _Accepted(left, kept, kept[:, :0].sum(1))
    # Once more, all samples together: the loss is that of `Fitting.measure`, and the accuracy is confirmed.
    accuracy, loss = fitting.measure(kept, chunk=chunk)
    sure = accuracy == 1
    return _Accepted(left[sure], kept[sure], loss[sure])


def _in_turn(y: Tensor) -> Tensor:
    """Positions of the samples such that the classes take turns."""
    rank = torch.zeros_like(y)
    for label in y.unique():
        rank[y == label] = torch.arange(int((y == label).sum()), device=y.device)
    return rank.argsort(stable=True)


def _collect(found: Found, seen: _Accepted, bins: Bins, block: int, each: int, keep: int) -> Found:
    place = bin_of(seen.loss, bins)
    hits, waits = found.hits.clone(), found.waits.clone()
    kept: list[int] = []
    have = torch.bincount(found.bin, minlength=len(bins)).tolist()
    for row, (number, at) in enumerate(zip(seen.number.tolist(), place.tolist(), strict=True)):
        if at < 0:
            continue
        hits[at] += 1
        if int(hits[at]) == each:
            waits[at] = found.tried + number + 1
        if have[at] < keep:
            have[at] += 1
            kept.append(row)
    return Found(
        torch.cat([found.weights, seen.weights[kept]]),
        torch.cat([found.bin, place[kept].cpu()]),
        torch.cat([found.loss, seen.loss[kept]]),
        hits,
        waits,
        found.accepted + len(seen.number),
        found.tried + block,
        found.seconds,
    )


def _filled(found: Found, each: int) -> str:
    return f"{int((found.hits >= each).sum())} of {len(found.hits)}"


def _expected(found: Found, each: int, limit: int, stop: bool) -> float:
    """Guesses that it will take at the rate so far, for the time that is left."""
    least = int(found.hits.min())
    return limit if not stop or least == 0 else max(found.tried, min(limit, found.tried * each / least))
