"""The whole search for proofs: linear bounds, optimised slopes, then branch and bound on hidden neurons.

Bounds of the hidden layers come from alpha-CROWN on the whole region and stay; slopes and multipliers of the splits are
optimised for every sub-problem. All that is proved is proved in float64 of the network as it is run, in its own
precision: every node may add what it rounds (`bounding.core.evaluation`).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.bounding.core.region import Region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import alpha
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.alpha import Ascent, Joint
from holdfast.bounding.linear.coefficients import Coefficients
from holdfast.bounding.linear.relax import Lines
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.certificates.complete.branch_and_bound import Effort, Found, Visit, search
from holdfast.certificates.complete.branching import places
from holdfast.certificates.complete.parts import Layout, Parts, Tasks, layout
from holdfast.certificates.complete.pieces import in_pieces
from holdfast.certificates.complete.split import choice, evaluate, view
from holdfast.utils import clock

ROOT = Ascent(iterations=300, joint=True)
"""The ascent before the first split; it ends earlier where it brings little, see `_Worth`."""
FIRST = 0.4
"""Share of the time that it may take."""
LEAST, STRIDE, AHEAD = 10, 5, 4
"""Iterations that it takes at least, and between looks at its gain; how many such strides a look counts on."""


@dataclass(frozen=True, eq=False)
class Network:
    """A network in its own precision and in float64, with the same nodes, and what has to be proved of it.

    Attributes:
        own: in its own precision.
        double: in float64.
        groups: (G, R) numbers of classes; of each group one class must stay below the label, everywhere. A group that
            has fewer classes repeats one.
    """

    own: Graph
    double: Graph
    groups: Tensor

    @property
    def layout(self) -> Layout:
        """The neurons that can be split."""
        return layout(self.double)


@dataclass(eq=False)
class State:
    """What is known of B inputs.

    Attributes:
        margins: (B, K) proved lower bounds, infinite at the label.
        excess: (B, G) proved lower bound of each group's best margin.
        broken: (B,) bool.  parts: (B,) int64.  seconds: (B,) float64.
    """

    margins: Tensor
    excess: Tensor
    broken: Tensor
    parts: Tensor
    seconds: Tensor

    def note(self, network: Network, index: Tensor, margins: Tensor) -> None:
        """Take over better bounds of the inputs `index`."""
        self.margins[index] = torch.maximum(self.margins[index], margins)
        best = self.margins[index][:, network.groups].amax(2)
        self.excess[index] = torch.maximum(self.excess[index], best)

    def open(self) -> Tensor:
        """Indices of the inputs that are neither proved nor broken."""
        return ((self.excess <= 0).any(1) & ~self.broken).nonzero()[:, 0]


def begin(network: Network, box: Region, y: Tensor) -> tuple[State, Relaxation]:
    """What CROWN proves over the region `box`, (B, *shape) in the precision of the model, and its relaxation."""
    exact = linear.relaxation(
        network.double, box.double(), slopes="adaptive", hidden=True, sound=True, runs_in=box.x.dtype
    )
    margins = _finite(linear.margin_bounds(exact, y)).scatter(1, y[:, None], torch.inf)
    none = torch.zeros(len(y), dtype=torch.int64, device=y.device)
    lowest = margins.new_full((len(y), len(network.groups)), -torch.inf)
    state = State(margins, lowest, none.bool(), none, none.double())
    state.note(network, torch.arange(len(y), device=y.device), margins)
    return state, exact


def tighten_and_split(
    network: Network,
    exact: Relaxation,
    box: Region,
    y: Tensor,
    left: Tensor,
    state: State,
    visit: Visit,
    effort: Effort,
    time_limit: float,
) -> None:
    """Decide the inputs `left` in `time_limit` seconds each: optimise slopes, then branch; updates the state.

    Args:
        network: what is proved.
        exact: its relaxation on the inputs `left`, in float64.
        box: their region, in the precision of the model.  y: their labels.
        left: indices of the inputs in the state.
        state: what is known of all inputs.
        visit: tests points for counter-examples; its inputs are places in `left`.
        effort: of the search.
        time_limit: seconds for each input, all that it has taken before included.
    """
    start = clock.now()
    pieces = Network(in_pieces(network.own), in_pieces(network.double), network.groups)
    if len(pieces.double.nodes) > len(network.double.nodes):  # maxima that can be split have other bounds
        network, (first, exact) = pieces, begin(pieces, box, y)
        state.note(network, left, first.margins)
    share = FIRST * (time_limit - float(state.seconds[left].max())) * len(left)
    classes = network.groups[(state.excess[left] <= 0).any(0)].unique()
    if len(classes) == 0:
        return
    fast = in_precision(exact, network.own, box)

    def rows(r: Relaxation) -> Coefficients:
        return Coefficients(linear.margin_rows(r, y).values[:, classes])

    worth = _Worth(network.groups, state.margins[left], classes)
    slopes = alpha.joint(fast, rows, ROOT, start + share, keeps=True, enough=worth.over)[1]
    bounds, exact = alpha.replayed(exact, rows, slopes)
    margins = state.margins[left].index_copy(1, classes, _finite(bounds)).scatter(1, y[:, None], torch.inf)
    state.note(network, left, margins)
    inputs, groups = (state.excess[left] <= 0).nonzero().unbind(1)
    if len(inputs) and network.layout.neurons:
        tasks = _tasks(network, in_precision(exact, network.own, box), exact, y, inputs, groups)
        best = state.margins[left[inputs, None], network.groups[groups]].argmax(1)
        number = torch.searchsorted(classes, network.groups[groups, best])
        roots = _roots(tasks, state.excess[left[inputs], groups], slopes, number, best)
        tasks = replace(tasks, scale=_scale(tasks, roots))
        state.seconds[left] += (clock.now() - start) / len(left)
        found = Found(
            torch.full_like(roots.bound, torch.inf),
            state.broken[left],
            torch.zeros_like(left, dtype=torch.bool),
            state.parts[left],
            state.seconds[left],
        )
        search(tasks, roots, found, visit, effort, torch.full_like(found.seconds, time_limit))
        state.excess[left[inputs], groups] = torch.maximum(roots.bound, found.bound)
        state.parts[left], state.seconds[left], state.broken[left] = found.parts, found.seconds, found.broken
    else:
        state.seconds[left] += (clock.now() - start) / len(left)


class _Worth:
    """Tells when an ascent before the first split should end.

    It goes on while the gain of the last few iterations, kept up for four times as many, would prove an input: then it
    is cheaper than splits, which have to prove it on every part.

    Args:
        groups: see `Network`.
        margins: (B, K) what is proved before.
        classes: (M,) whose margins the ascent raises.
    """

    def __init__(self, groups: Tensor, margins: Tensor, classes: Tensor) -> None:
        self.groups, self.margins, self.classes = groups, margins, classes
        self.gaps: list[Tensor] = []

    def over(self, bounds: Tensor) -> bool:
        """Whether to end, with the best bounds (B, M) after one more iterate."""
        both = torch.maximum(self.margins[:, self.classes], bounds.to(self.margins))
        best = self.margins.index_copy(1, self.classes, both)[:, self.groups].amax(2)
        self.gaps.append(best.clamp(max=0).neg().amax(1))  # of each input: what its worst group lacks
        gap, done = self.gaps[-1], len(self.gaps) - 1
        if done and not bool((self.gaps[-2] > 0).any()):  # a second iterate: rounding costs a little
            return True
        if done < LEAST or done % STRIDE:
            return False
        gain = self.gaps[-1 - STRIDE] - gap
        return not bool(((gap > 0) & (AHEAD * gain > gap)).any())


def _tasks(network: Network, fast: Relaxation, exact: Relaxation, y: Tensor, inputs: Tensor, groups: Tensor) -> Tasks:
    """One task for each open group of each input."""
    one_hot = torch.eye(network.double.nodes[-1].shape[0], dtype=torch.float64, device=y.device)
    rows = one_hot[y[inputs]][:, None] - one_hot[network.groups[groups]]
    neurons = network.layout
    scale = torch.ones(len(inputs), len(neurons.layers), dtype=torch.float64, device=y.device)
    return Tasks(fast, exact, neurons, inputs, rows, scale)


def _roots(tasks: Tasks, bound: Tensor, slopes: Joint, number: Tensor, best: Tensor) -> Parts:
    """One part for each task, with the slopes that the ascent ended with for row `number` of its rows at the output."""
    last, graph = len(tasks.fast.graph.nodes) - 1, tasks.fast.graph
    kept = slopes.slopes if slopes.kept is None else slopes.kept
    values, ranges = [], []
    for layer in tasks.layout.layers:
        k, given = layer.node, kept.get((last, 0, layer.node))
        before = tasks.exact.intervals[graph.nodes[k].inputs[0]]
        ranges.append(torch.stack([end[tasks.inputs].flatten(1) for end in before], -1))
        op = graph.nodes[k].op
        assert isinstance(op, ops.Activation)
        if layer.curved:
            ends = [end[tasks.inputs].to(bound) for end in before]
            if given is None:
                pair = torch.stack(places(op, *ends), 1)
            else:
                pair = given.detach()[tasks.inputs, number].movedim(-1, 1)
            values.append(torch.cat([pair, torch.zeros_like(pair[:, :1])], 1).flatten(1))
        elif given is not None:
            values.append(given.detach()[tasks.inputs, number].flatten(1))
        else:
            values.append(tasks.fast.lines[k].lower_slope[tasks.inputs].flatten(1))
    dtype = tasks.fast.region.x.dtype
    flat = torch.cat([value.to(dtype) for value in values], 1)
    signs = torch.zeros(len(bound), tasks.layout.neurons, dtype=torch.int8, device=bound.device)
    own = torch.cat(ranges, 1) if tasks.layout.curved else bound.new_zeros(len(bound), 0, 2)
    mix = torch.zeros(tasks.rows.shape[:2], dtype=dtype, device=bound.device).scatter(1, best[:, None], 1.0)
    return Parts(torch.arange(len(bound), device=bound.device), bound, signs, flat, mix, own)


def _scale(tasks: Tasks, roots: Parts) -> Tensor:
    """The largest coefficient of every layer at the root, (T, layers)."""
    v, seen = view(tasks, roots), dict[int, Tensor]()
    evaluate(v, choice(tasks, roots, v), seen)
    none = roots.bound.new_zeros(len(roots), 1)
    return torch.stack(
        [seen.get(layer.node, none).flatten(1).abs().amax(1).double() for layer in tasks.layout.layers], 1
    )


def _finite(bounds: Tensor) -> Tensor:
    """A bound that overflowed proves nothing."""
    return torch.where(bounds.isfinite(), bounds, -torch.inf)


def in_precision(exact: Relaxation, graph: Graph, box: Region) -> Relaxation:
    """The relaxation in the precision of the box, without its account of rounding."""
    like = box.x

    def cast(line: Lines) -> Lines:
        low = None if line.lower_shift is None else line.lower_shift.to(like)
        return Lines(line.lower_slope.to(like), low, line.upper_slope.to(like), line.upper_shift.to(like))

    intervals = [(low.to(like), high.to(like)) for low, high in exact.intervals]
    return Relaxation(graph, box, False, intervals, {k: cast(line) for k, line in exact.lines.items()})
