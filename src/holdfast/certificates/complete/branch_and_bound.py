"""Branch and bound over the signs and ranges of hidden neurons, for many inputs at once.

The open parts of all tasks are in one pool. Each round takes the parts with the worst bounds of every task, splits
them, and bounds both halves. What a task does in a round does not depend on the other tasks, so the answer for an input
does not depend on the batch. A task is proved when none of its parts is left.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from holdfast.certificates.complete.branching import split
from holdfast.certificates.complete.parts import Parts, Tasks, join
from holdfast.certificates.complete.pool import Pool
from holdfast.certificates.complete.split import optimise, prove
from holdfast.errors import OutOfTime
from holdfast.utils import clock
from holdfast.utils.progress import Searched, tell

Visit = Callable[[Tensor, Tensor], Tensor]
"""(inputs (N,), points (N, *shape)) -> (N,) bool: is the point a counter-example for the input?"""
AT_ONCE = 2**19
"""Neurons of all parts that are bounded at a time: what a step computes then stays near the cache."""
POOL = 2**30
"""Bytes that open parts may take; beyond that the most promising parts come first, so that the pool shrinks."""
LAST = 40
"""Steps for a part that has no neuron left to split: its bound is then a linear program, solved by the ascent only."""


@dataclass(frozen=True)
class Effort:
    """How much work a part gets.

    Attributes:
        steps: of the ascent on slopes and multipliers.
        candidates: neurons that are tried before a split.
        width: parts of each task that a round splits.
    """

    steps: int = 6
    candidates: int = 4
    width: int = 32


@dataclass(eq=False)
class Found:
    """What the search knows.

    Attributes:
        bound: (T,) proved lower bound of each task.
        broken: (B,) bool, inputs with a counter-example.
        open: (B,) bool, inputs that were given up.
        parts: (B,) int64, parts that were bounded.
        seconds: (B,) time spent on each input.
    """

    bound: Tensor
    broken: Tensor
    open: Tensor
    parts: Tensor
    seconds: Tensor


def search(tasks: Tasks, parts: Parts, found: Found, visit: Visit, effort: Effort, limit: Tensor) -> Found:
    """Split until every task is proved, broken, given up, or out of time.

    Args:
        tasks: what is to be proved.
        parts: the parts to begin with, one for each open task.
        found: what is known before; updated in place and returned.
        visit: tests points for counter-examples.
        effort: how much work a part gets.
        limit: (B,) seconds for each input, counted in `found.seconds`.
    """
    inputs, pool = tasks.inputs, Pool(parts)
    size = max(1, AT_ONCE // max(1, tasks.layout.neurons))
    while True:
        start = clock.now()
        _settle(tasks, pool, found, limit)
        places = _chosen(pool, effort.width)
        if len(places) == 0:
            return found
        tell(partial(_state, pool, found))
        alive = torch.bincount(inputs[pool.light()[1]], minlength=len(limit)) > 0
        found.seconds += (clock.now() - start) * alive / alive.sum()
        for piece in places.split(size):
            some = pool.take(piece)
            open_ = (limit > found.seconds)[inputs[some.task]] & ~found.broken[inputs[some.task]]
            if not bool(open_.all()):
                pool.put(some.select(~open_))
                some = some.select(open_)
            if len(some):
                try:
                    pool.put(_round(tasks, some, found, visit, effort))
                except OutOfTime:  # the deadline around the call: what was taken stays open, as it was
                    pool.put(some)
                    found.seconds = torch.maximum(found.seconds, limit)


def _state(pool: Pool, found: Found) -> Searched:
    """How far the search has come; the worst bound is the one that is farthest from a proof."""
    _, task, bound = pool.light()
    return Searched(int(found.parts.sum()), float(bound.min()), len(task))


def _settle(tasks: Tasks, pool: Pool, found: Found, limit: Tensor) -> None:
    """Drop the parts of inputs that are broken, given up or out of time; their bounds stay."""
    places, task, bound = pool.light()
    has = torch.zeros_like(found.broken)
    has[tasks.inputs[task]] = True
    found.open |= (found.seconds >= limit) & ~found.broken & has
    over = (found.open | found.broken)[tasks.inputs[task]]
    found.bound.scatter_reduce_(0, task[over], bound[over], "amin")
    pool.take(places[over])


def _chosen(pool: Pool, width: int) -> Tensor:
    """Places of the `width` parts of each task with the worst bounds, of the best ones where memory is short."""
    places, task, bound = pool.light()
    order = bound.argsort(descending=pool.bytes > POOL, stable=True)
    order = order[task[order].argsort(stable=True)]
    tasks = task[order]
    rank = torch.arange(len(tasks), device=tasks.device) - torch.searchsorted(tasks, tasks)
    return places[order[rank < width].sort().values]


def _round(tasks: Tasks, parts: Parts, found: Found, visit: Visit, effort: Effort) -> Parts:
    """Split parts and bound both halves; returns the halves that stay open."""
    start = clock.now()
    halves, can = split(tasks, parts, effort.candidates)
    left = _bounded(tasks, halves, found, visit, effort.steps)
    if not bool(can.all()):  # nothing left to split: give up what a long ascent does not prove
        last = parts.select(~can)
        has_more = bool((last.signs != 0).any()) or last.mix.shape[1] > 1  # than slopes, which are at their best
        last = _bounded(tasks, last, found, visit, LAST if has_more else 0)
        found.open[tasks.inputs[last.task]] = True
        left = join([left, last])
    inputs = tasks.inputs[parts.task]
    counts = torch.bincount(inputs, minlength=len(found.parts))
    found.parts += 2 * counts
    found.seconds += (clock.now() - start) * counts / len(parts)
    return left


def _bounded(tasks: Tasks, parts: Parts, found: Found, visit: Visit, steps: int) -> Parts:
    """Bound parts; note what is proved, and return the others."""
    if len(parts) == 0:
        return parts
    parts, points = optimise(tasks, parts, steps)
    parts = prove(tasks, parts)
    closed = parts.bound > 0
    done = parts.select(closed)
    found.bound.scatter_reduce_(0, done.task, done.bound, "amin")
    left = parts.select(~closed)
    if len(left):
        inputs = tasks.inputs[left.task]
        found.broken[inputs[visit(inputs, points[~closed])]] = True
    return left
