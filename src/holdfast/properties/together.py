"""Bounds of many cases at once: a property may list thousands of boxes, most of which one look decides."""

import math
from collections.abc import Sequence

import torch

from holdfast.bounding.core.region import Region
from holdfast.bounding.core.rounding import unit
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import Coefficients
from holdfast.bounding.linear.relax import Slopes
from holdfast.certificates.complete.problem import Answer
from holdfast.certificates.complete.zonotope import covers
from holdfast.errors import OutOfTime, UnsupportedError
from holdfast.properties.asked import Subject, conditions_of
from holdfast.properties.property import Case
from holdfast.utils import clock

AT_ONCE = 256
"""Cases that are bounded at a time, at most."""
NUMBERS = 2**22
"""Values of all nodes of a network, over the cases of a batch."""
SHARE = 0.3
"""Of the time that is left."""


@torch.no_grad()
def bounded_together(subject: Subject, cases: Sequence[Case], deadline: float) -> list[Answer]:
    """What linear bounds over the boxes of all cases say, "holds" or "unknown" of each."""
    answers = [Answer("unknown", -math.inf) for _ in cases]
    ready = [i for i, case in enumerate(cases) if case.ball is None and len(conditions_of(case).rows)]
    if len(ready) < 2:  # a single case gets all that there is
        return answers
    until = clock.now() + SHARE * (deadline - clock.now())
    try:
        with clock.until(until):
            _note(subject, cases, ready, answers, until)
    except (OutOfTime, UnsupportedError):  # the cases stay open; each of them says why, if nothing decides it
        pass
    return answers


def _note(subject: Subject, cases: Sequence[Case], ready: list[int], answers: list[Answer], until: float) -> None:
    at, size = 0, 1  # the first case alone: the size of a batch depends on the graph
    while at < len(ready) and clock.now() < until:
        chosen = ready[at : at + size]
        at += size
        lower, upper = subject.box([cases[i] for i in chosen])
        graph, _ = subject.graphs(lower, upper)
        bounds = _bounds(subject, graph, Region(lower, upper, (lower + upper) / 2), [cases[i] for i in chosen])
        for i, bound in zip(chosen, bounds, strict=True):
            answers[i] = Answer("holds" if bound > 0 else "unknown", bound, 1)
        values = sum(math.prod(node.shape) for node in graph.nodes)
        size = max(1, min(AT_ONCE, NUMBERS // values))


def _bounds(subject: Subject, graph: Graph, region: Region, cases: Sequence[Case]) -> list[float]:
    """A lower bound of the least excess of a group, for each case."""
    asked = [conditions_of(case) for case in cases]
    most = max(len(one.rows) for one in asked)
    rows = torch.stack([torch.cat([one.rows, one.rows[:1].expand(most - len(one.rows), -1)]) for one in asked])
    slopes: Slopes | None = "adaptive" if covers(graph) else None
    r = linear.relaxation(graph, region, slopes=slopes, hidden=slopes is not None, sound=True, runs_in=subject.dtype)
    least = linear.concretise(r, linear.backward(r, len(graph.nodes) - 1, Coefficients(rows)))
    found = []
    for one, bound in zip(asked, least, strict=True):
        excess = bound[: len(one.rows)] - one.limits
        excess = excess - 4 * unit(excess.dtype) * (bound[: len(one.rows)].abs() + one.limits.abs())
        excess = torch.where(excess.isfinite(), excess, -torch.inf)  # an overflow proves nothing
        found.append(float(one.worst(excess[None]).amin()))
    return found
