"""Linear bounds with optimised slopes.

Any lower slope between the slope of the negative side and 1 is sound for an unstable ReLU, and any slope at all for an
S-shaped function. Which one is best depends on the neuron and on what is bounded, so it is found by gradient ascent on
the bound itself (Xu et al., "Fast and complete: enabling complete verification with massively parallel incomplete
verifiers", 2021). Every iterate is a sound bound; the best one of each row is kept.

Any slopes will do for a proof. With an account of rounding the ascent therefore runs in the precision of the network,
without that account, and the best slopes of each row then give one bound in float64, with the rounding of the run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from holdfast.bounding import interval
from holdfast.bounding.core.evaluation import doubled
from holdfast.bounding.core.region import Region
from holdfast.bounding.core.rounding import below
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.climb import ASCENT, Ascent, K, climb, keep
from holdfast.bounding.linear.coefficients import Coefficients, seen
from holdfast.bounding.linear.relax import PIECEWISE, S_SHAPED, Lines, curved_lines, slope_range
from holdfast.bounding.linear.relaxation import Relaxation

__all__ = ["ASCENT", "Ascent", "Joint", "bounds", "joint", "joint_step", "margin_bounds", "optimise", "output_bounds"]


def select(r: Relaxation, index: Tensor) -> Relaxation:
    """The relaxation of some of the inputs, which may be repeated; many copies of one input share its memory."""
    one = len(index) > 1 and bool((index == index[0]).all())

    def take(v: Tensor) -> Tensor:
        return v[index[:1]].expand(len(index), *v.shape[1:]) if one else v[index]

    def lines(line: Lines) -> Lines:
        low = None if line.lower_shift is None else take(line.lower_shift)
        return Lines(take(line.lower_slope), low, take(line.upper_slope), take(line.upper_shift))

    box = r.region
    eps = None if box.eps is None else take(box.eps)
    return replace(
        r,
        region=replace(box, lower=take(box.lower), upper=take(box.upper), x=take(box.x), eps=eps),
        intervals=[(take(low), take(high)) for low, high in r.intervals],
        lines={k: lines(line) for k, line in r.lines.items()},
        errors={k: take(error) for k, error in r.errors.items()},
        losses={k: take(loss) for k, loss in r.losses.items()},
    )


def optimise(r: Relaxation, start: Coefficients, ascent: Ascent) -> Tensor:
    """Lower bounds of the rows `start` at the output, (B, M), with slopes for each neuron and row.

    Args:
        r: the relaxed network; its slopes are the start of the ascent. If it accounts for rounding, so do the bounds.
        start: rows at the output, dense (B, M, K).
        ascent: how to optimise.
    """
    exact = in_double(r) if _replays(r) else None
    fast = r if exact is None else replace(r, sound=False, errors={}, losses={})
    slopes: dict[int, Tensor] = {}
    kept: dict[int, Tensor] = {}
    _bounded(fast, start, slopes)  # makes the slopes
    floors = {k: _floor(r, k) for k in slopes}
    note = None if exact is None else partial(keep, kept, slopes)
    best = climb(slopes, lambda: _bounded(fast, start, slopes), ascent, floors, note=note)
    if exact is None:
        return best
    found = _bounded(exact, Coefficients(start.values.double()), _widened(kept, floors))
    return below(found, r.region.x.dtype)


def _bounded(r: Relaxation, start: Coefficients, slopes: dict[int, Tensor]) -> Tensor:
    """Lower bounds (B, M) of the rows `start` at the output with the slopes."""
    planes = linear.backward(r, len(r.graph.nodes) - 1, start, lambda k, c: _chosen(r, k, c, slopes, k))
    return linear.concretise(r, planes)


def _replays(r: Relaxation) -> bool:
    """Whether slopes are sought without an account of rounding first."""
    return r.sound and r.region.x.dtype != torch.float64


def in_double(r: Relaxation) -> Relaxation:
    """CROWN's relaxation of the same region in float64, of the network as it is run in the precision of r."""
    precision = r.region.x.dtype
    return linear.relaxation(
        doubled(r.graph), r.region.double(), slopes="adaptive", hidden=True, sound=True, runs_in=precision
    )


def _widened(slopes: dict[K, Tensor], floors: dict[K, float]) -> dict[K, Tensor]:
    """Slopes in float64, within their range there."""
    return {k: slope.double().clamp(floors[k], 1.0) for k, slope in slopes.items()}


def _floor(r: Relaxation, k: int) -> float:
    """Least value of what is optimised at activation k; the largest is 1."""
    op = r.graph.nodes[k].op
    return op.parameter if isinstance(op, ops.Activation) and op.kind in PIECEWISE else 0.0


def _chosen(r: Relaxation, k: int, c: Coefficients, slopes: dict[K, Tensor], key: K) -> Tensor | Lines | None:
    """Lower slopes, or lines, of activation k for rows with the coefficients c; made when first needed.

    A (leaky) ReLU has one number for each coefficient, the slope of the line below where it is unstable. An S-shaped
    function has two: where in the range of its derivatives the slopes of the lines below and above lie.
    """
    op = r.graph.nodes[k].op
    if not isinstance(op, ops.Activation):
        return None
    line, (lower, upper) = r.lines[k], r.intervals[r.graph.nodes[k].inputs[0]]
    if op.kind in S_SHAPED:
        return _curved(op.kind, line, (seen(lower, c), seen(upper, c)), c, slopes, key)
    low = seen(line.lower_slope, c)
    if key not in slopes:
        slopes[key] = low.detach().expand(torch.broadcast_shapes(low.shape, c.values.shape)).clone()
    free = seen(((lower < 0) & (upper > 0)).to(low.dtype), c) > 0
    return torch.where(free, slopes[key], low)


def _curved(kind: str, line: Lines, ends: interval.Interval, c: Coefficients, slopes: dict[K, Tensor], key: K) -> Lines:
    least, most = slope_range(kind, *ends)
    width = most - least
    if key not in slopes:
        start = torch.stack([seen(line.lower_slope, c), seen(line.upper_slope, c)], -1).detach()
        smallest = torch.finfo(width.dtype).tiny
        start = ((start - least[..., None]) / width[..., None].clamp(min=smallest)).clamp(0, 1)
        slopes[key] = start.expand(*torch.broadcast_shapes(start.shape[:-1], c.values.shape), 2).clone()
    low, up = (least[..., None] + slopes[key] * width[..., None]).unbind(-1)
    return curved_lines(kind, low, up, *ends)


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
        replays = sound and ascent.joint and region.x.dtype != torch.float64
        r = linear.relaxation(graph, region, slopes="adaptive", hidden=True, sound=sound and not replays)
        if not ascent.joint:
            return optimise(r, start(r), ascent)
        if not replays:
            return joint(r, start, ascent)[0]
        exact = in_double(r)
        return below(replayed(exact, start, joint(r, start, ascent, keeps=True)[1])[0], region.x.dtype)


@dataclass(frozen=True, eq=False)
class Joint:
    """Slopes behind the bounds of all layers.

    Attributes:
        neurons: by hidden layer, the neurons that have rows, see `linear.chosen`.
        slopes: by node, chunk of its rows, and activation; the output is the last node.
        known: best bounds of the hidden layers so far.
        kept: the best slopes of each row, where they are wanted.
        best: by node and chunk of its rows, the best bounds of the rows (B, M) behind `kept`.
    """

    neurons: dict[int, Tensor]
    slopes: dict[tuple[int, int, int], Tensor]
    known: dict[int, interval.Interval]
    kept: dict[tuple[int, int, int], Tensor] | None = None
    best: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def note(self, rows: tuple[int, int], better: Tensor) -> None:
        """Keep the slopes of those rows of a chunk that are better than ever, (B, M) bool."""
        assert self.kept is not None
        keep(self.kept, {key: slope for key, slope in self.slopes.items() if key[:2] == rows}, better)

    def compare(self, rows: tuple[int, int], lower: Tensor, upper: Tensor) -> None:
        """Note which rows of a hidden layer, with bounds (B, M / 2) on both sides, are better than ever."""
        value = torch.stack([lower, -upper], -1).detach().flatten(1)
        best = self.best.get(rows)
        self.note(rows, torch.ones_like(value, dtype=torch.bool) if best is None else value > best)
        self.best[rows] = value if best is None else torch.maximum(best, value)


def joint(
    r: Relaxation,
    start: Callable[[Relaxation], Coefficients],
    ascent: Ascent,
    until: float = math.inf,
    *,
    keeps: bool = False,
    enough: Callable[[Tensor], bool] | None = None,
) -> tuple[Tensor, Joint]:
    """Optimise the slopes for every row at the output and for every row that bounds a hidden neuron.

    The bounds of hidden neurons are the best of all iterates so far; a row that is behind still gets a gradient.

    Args:
        r: the relaxed network.
        start: makes the rows, dense (B, M, K), for a relaxation.
        ascent: how to optimise.
        until: when to stop, by `holdfast.utils.clock.now`.
        keeps: keep the best slopes of each row.
        enough: called with the best bounds (B, M) after every iterate: True ends the ascent.

    Returns:
        Lower bounds (B, M), and the slopes of the last iterate.
    """
    known = {i: r.intervals[i] for i in linear.hidden_layers(r.graph)}
    neurons = {i: linear.chosen(r.graph, i, linear.open_neurons(r, i)) for i in known}
    state = Joint(neurons, {}, known)
    joint_step(r, start, state)  # makes the slopes
    state = replace(state, kept={} if keeps else None)
    floors = {key: _floor(r, key[2]) for key in state.slopes}
    note = partial(state.note, (len(r.graph.nodes) - 1, 0)) if keeps else None
    step = partial(joint_step, r, start, state)
    return climb(state.slopes, lambda: step()[0], ascent, floors, until, note, enough), state


def replayed(exact: Relaxation, start: Callable[[Relaxation], Coefficients], state: Joint) -> tuple[Tensor, Relaxation]:
    """Bounds (B, M) of the relaxation `exact` in float64 with the best slopes of an ascent, and its relaxation."""
    slopes = state.slopes if state.kept is None else state.kept
    floors = {key: _floor(exact, key[2]) for key in slopes}
    known = {i: exact.intervals[i] for i in state.known}
    return joint_step(exact, start, Joint(state.neurons, _widened(slopes, floors), known))


def joint_step(r: Relaxation, start: Callable[[Relaxation], Coefficients], state: Joint) -> tuple[Tensor, Relaxation]:
    """Bounds (B, M) with the slopes of `state`, whose known bounds are tightened, and the relaxation they come from."""

    def chosen(now: Relaxation, rows: tuple[int, int], k: int, c: Coefficients) -> Tensor | Lines | None:
        return _chosen(now, k, c, state.slopes, (*rows, k))

    last, rows = (
        len(r.graph.nodes) - 1,
        linear.Rows(state.neurons, state.known, chosen, None if state.kept is None else state.compare),
    )
    now = linear.relaxation(
        r.graph, r.region, slopes="adaptive", hidden=True, sound=r.sound, rows=rows, runs_in=r.runs_in
    )
    for i in state.known:
        state.known[i] = now.intervals[i][0].detach(), now.intervals[i][1].detach()
    planes = linear.backward(now, last, start(now), partial(chosen, now, (last, 0)))
    return linear.concretise(now, planes), now


def margin_bounds(graph: Graph, region: Region, y: Tensor, ascent: Ascent, *, sound: bool) -> Tensor:
    """Optimised lower bounds of z_y - z_j, (B, K); zero at j = y."""

    def start(r: Relaxation) -> Coefficients:
        return linear.margin_rows(r, y)

    return bounds(graph, region, start, ascent, sound=sound).scatter(1, y[:, None], 0.0)


def output_bounds(graph: Graph, region: Region, ascent: Ascent, *, sound: bool) -> interval.Interval:
    """Optimised bounds of the logits, (B, K) each."""
    classes = graph.nodes[-1].shape[0]

    def start(r: Relaxation) -> Coefficients:
        one = torch.eye(classes, dtype=r.region.x.dtype, device=r.region.x.device)
        return Coefficients(torch.cat([one, -one]).expand(len(region.x), -1, -1))

    found = bounds(graph, region, start, ascent, sound=sound)
    return found[:, :classes], -found[:, classes:]
