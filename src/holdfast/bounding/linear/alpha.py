"""Linear bounds with optimised slopes.

Any lower slope between the slope of the negative side and 1 is sound for an unstable ReLU. Which one is best depends on
the neuron and on what is bounded, so it is found by gradient ascent on the bound itself (Xu et al., "Fast and complete:
enabling complete verification with massively parallel incomplete verifiers", 2021). Every iterate is a sound bound; the
best one of each row is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import Coefficients, seen
from holdfast.bounding.linear.relax import PIECEWISE, Lines
from holdfast.bounding.linear.relaxation import Relaxation

K = TypeVar("K")


@dataclass(frozen=True)
class Ascent:
    """How to optimise: Adam with a learning rate that decays by `decay` each iteration.

    `joint` also optimises the slopes behind the bounds of the hidden layers, which are then computed anew in every
    iteration: tighter, and many times as costly. `hope` leaves out, in a certificate, the inputs whose margin by CROWN
    is below -hope times the margin of the input itself: slopes seldom make up for more than a tenth of it.
    """

    iterations: int = 20
    learning_rate: float = 0.1
    decay: float = 0.98
    joint: bool = False
    hope: float = math.inf


ASCENT = Ascent()


def select(r: Relaxation, index: Tensor) -> Relaxation:
    """The relaxation of some of the inputs."""

    def lines(line: Lines) -> Lines:
        low = None if line.lower_shift is None else line.lower_shift[index]
        return Lines(line.lower_slope[index], low, line.upper_slope[index], line.upper_shift[index])

    return replace(
        r,
        region=r.region.select(index),
        intervals=[(low[index], high[index]) for low, high in r.intervals],
        lines={k: lines(line) for k, line in r.lines.items()},
        errors={k: error[index] for k, error in r.errors.items()},
        losses={k: loss[index] for k, loss in r.losses.items()},
    )


def optimise(r: Relaxation, start: Coefficients, ascent: Ascent) -> Tensor:
    """Lower bounds of the rows `start` at the output, (B, M), with one slope per neuron and row.

    Args:
        r: the relaxed network; its slopes are the start of the ascent.
        start: rows at the output, dense (B, M, K).
        ascent: how to optimise.
    """
    last, rows = len(r.graph.nodes) - 1, start.values.shape[1]
    slopes = {k: low.detach()[:, None].repeat_interleave(rows, 1) for k, low, _, _ in _free(r)}

    def bound() -> Tensor:
        return linear.concretise(r, linear.backward(r, last, start, _held(r, slopes)))

    return _ascend(slopes, bound, ascent, {k: floor for k, _, floor, _ in _free(r)})


def _free(r: Relaxation) -> list[tuple[int, Tensor, float, Tensor]]:
    """Activations whose lower slope is free: node, slope, its least value, and where it is free (B, *shape)."""
    free = []
    for k, lines in r.lines.items():
        op = r.graph.nodes[k].op
        if isinstance(op, ops.Activation) and op.kind in PIECEWISE:
            lower, upper = r.intervals[r.graph.nodes[k].inputs[0]]
            free.append((k, lines.lower_slope, op.parameter, (lower < 0) & (upper > 0)))
    return free


def _held(r: Relaxation, slopes: dict[int, Tensor]) -> dict[int, Tensor]:
    """The slopes where they are free, the slope of the exact line elsewhere."""
    return {k: torch.where(where[:, None], slopes[k], low[:, None]) for k, low, _, where in _free(r) if k in slopes}


def _ascend(slopes: dict[K, Tensor], bound: Callable[[], Tensor], ascent: Ascent, floors: dict[K, float]) -> Tensor:
    """Raise `bound()` (B, M) by projected Adam on the slopes; the best value of each row."""
    with torch.enable_grad():
        for slope in slopes.values():
            slope.requires_grad_(True)
        adam = torch.optim.Adam(list(slopes.values()), lr=ascent.learning_rate) if slopes else None
        value = bound()
        best = value.detach()
        for _ in range(ascent.iterations if adam else 0):
            assert adam is not None
            gradients = torch.autograd.grad(-value.sum(), list(slopes.values()), allow_unused=True)
            for slope, gradient in zip(slopes.values(), gradients, strict=True):
                slope.grad = gradient
            adam.step()
            for group in adam.param_groups:
                group["lr"] *= ascent.decay
            with torch.no_grad():
                for k, slope in slopes.items():
                    slope.clamp_(floors[k], 1.0)
            value = bound()
            best = torch.maximum(best, value.detach())
    return best


def bounds(
    graph: Graph, region: Region, start: Callable[[Relaxation], Coefficients], ascent: Ascent, *, sound: bool
) -> Tensor:
    """Optimised lower bounds of rows at the output, (B, M).

    Args:
        graph: the network.
        region: the inputs.
        start: makes the rows, dense (B, M, K), for a relaxation.
        ascent: how to optimise.
        sound: account for rounding.
    """
    with torch.no_grad():
        r = linear.relaxation(graph, region, slopes="adaptive", hidden=True, sound=sound)
        return _joint(r, start, ascent) if ascent.joint else optimise(r, start(r), ascent)


def _joint(r: Relaxation, start: Callable[[Relaxation], Coefficients], ascent: Ascent) -> Tensor:
    """Slopes for every row at the output and for every row that bounds a hidden neuron."""
    floor = {k: floor for k, _, floor, _ in _free(r)}
    last = len(r.graph.nodes) - 1
    slopes: dict[tuple[int, int, int], Tensor] = {}  # by node, chunk of its rows, and activation
    known = {i: r.intervals[i] for i in linear.hidden_layers(r.graph)}
    neurons = {i: linear.chosen(r.graph, i, linear.open_neurons(r, i)) for i in known}

    def chosen(now: Relaxation, rows: tuple[int, int], k: int, c: Coefficients) -> Tensor | None:
        """Slopes of activation k where it is unstable now, the exact line's elsewhere; made when first needed."""
        if k not in floor:
            return None
        low, upper = now.lines[k].lower_slope, now.intervals[now.graph.nodes[k].inputs[0]]
        line = seen(low, c)
        if (*rows, k) not in slopes:
            shape = torch.broadcast_shapes(line.shape, c.values.shape)
            slopes[(*rows, k)] = line.detach().expand(shape).clone()
        free = seen(((upper[0] < 0) & (upper[1] > 0)).to(low.dtype), c) > 0
        return torch.where(free, slopes[(*rows, k)], line)

    def bound() -> Tensor:
        rows = linear.Rows(neurons, known, chosen)
        now = linear.relaxation(r.graph, r.region, slopes="adaptive", hidden=True, sound=r.sound, rows=rows)
        return linear.concretise(now, linear.backward(now, last, start(now), partial(chosen, now, (last, 0))))

    bound()  # makes the slopes
    return _ascend(slopes, bound, ascent, {key: floor[key[2]] for key in slopes})


def margin_bounds(graph: Graph, region: Region, y: Tensor, ascent: Ascent, *, sound: bool) -> Tensor:
    """Optimised lower bounds of z_y - z_j, (B, K); zero at j = y."""

    def start(r: Relaxation) -> Coefficients:
        return linear.margin_rows(r, y)

    return bounds(graph, region, start, ascent, sound=sound).scatter(1, y[:, None], 0.0)


def output_bounds(graph: Graph, region: Region, ascent: Ascent, *, sound: bool) -> interval.Interval:
    """Optimised bounds of the logits, (B, K) each."""
    classes = graph.nodes[-1].shape[0]

    def start(r: Relaxation) -> Coefficients:
        one = torch.eye(classes, dtype=region.x.dtype, device=region.x.device)
        return Coefficients(torch.cat([one, -one]).expand(len(region.x), -1, -1))

    found = bounds(graph, region, start, ascent, sound=sound)
    return found[:, :classes], -found[:, classes:]
