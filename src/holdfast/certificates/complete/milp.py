"""The exact smallest margin of a piecewise linear network over a box, by mixed-integer programming.

Branch and bound over the zero-one choices. HiGHS, through scipy, solves the linear relaxation of every node; the bound
that counts is the one that `milp_bound` proves from its multipliers, so no tolerance of the solver has to be trusted.
"""

import copy
import heapq
import itertools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.bounding.core.evaluation import doubled, evaluation_error
from holdfast.bounding.core.region import Region, region
from holdfast.bounding.core.rounding import below
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.interval import Interval
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relax import PIECEWISE
from holdfast.certificates.complete.milp_bound import Relaxed, Scaled, relax, scale
from holdfast.certificates.complete.milp_model import Floats, Indices, Skeleton, program, skeleton
from holdfast.certificates.complete.pieces import in_pieces
from holdfast.checks import check_precision, check_task
from holdfast.errors import UnsupportedError, argument
from holdfast.registry import Certificate, get
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.utils import clock
from holdfast.utils.options import Positive, Whole
from holdfast.utils.show import Shown

Status = Literal["certified", "broken", "unknown"]

GAP = 1e-7
"""Distance of bound and best point at which the margin counts as exact, relative to the largest logit."""


@dataclass(frozen=True, eq=False, repr=False)
class MilpResult(Shown):
    """What the solver found out about each input.

    Attributes:
        status: "certified" (the margin is positive, by more than `slack`), "broken" (`x_adv` is misclassified) or
            "unknown" (out of time, too many binaries, or within the slack of zero).
        margin: (B,) float64. A proven lower bound of the smallest margin min_j z_y - z_j over the threat set; that
            margin itself, up to GAP, where `exact`.
        slack: (B,) float64. What rounding of the model, when it is run, can make of it.
        exact: (B,) bool. Solved to optimality: a point of the set has the margin, up to GAP.
        x_adv: a misclassified input of the threat set where "broken", else x; shape of x.
        binaries: (B,) int64, zero-one variables.  nodes: (B,) int64, branches explored.
        seconds: (B,) float64, time spent.
    """

    status: tuple[Status, ...]
    margin: Tensor
    slack: Tensor
    exact: Tensor
    x_adv: Tensor
    binaries: Tensor
    nodes: Tensor
    seconds: Tensor


@Certificate(
    "milp",
    summary="exact: mixed-integer programming decides every input of a small piecewise linear network, given time",
    threats=("linf", "box"),
    reference="Tjeng et al., Evaluating robustness of neural networks with mixed integer programming, 2019",
    complete=True,
)
def milp(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, time_limit: Positive = 60.0, max_binaries: Whole = 2000
) -> CertifyResult:
    """Certified if the solver proves that the smallest margin over the threat set is positive.

    Prefer it where CROWN leaves an input open and the network is small; the time grows exponentially with the neurons
    that the bounds leave unstable. An input that is not decided in time is not certified. It stops as soon as the
    verdict is known, so `margin` is a lower bound; `exact_margin` has the exact value and counter-examples.

    Args:
        model: from (B, ...) to logits (B, K), of affine layers, (leaky) ReLU, max pooling, MinMax, sums, concatenation.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: Linf or Box.
        time_limit: seconds for each input, over all of its classes.
        max_binaries: an input that needs more zero-one variables is left undecided.
    """
    found = _solve(model, x, y, threat, time_limit=time_limit, max_binaries=max_binaries, verdict=True)
    margin = below(found.margin - found.slack, x.dtype).to(x)
    margin = margin.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    certified = torch.tensor([s == "certified" for s in found.status], device=x.device) & (margin > 0)
    by = tuple("" if status == "unknown" else "milp" for status in found.status)
    return CertifyResult(certified, margin, by=by, x_adv=found.x_adv)


def exact_margin(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, time_limit: Positive = 60.0, max_binaries: Whole = 2000
) -> MilpResult:
    """The smallest margin z_y - z_j over the threat set, solved to optimality, and a point that attains it.

    Arguments as for `milp`.

    Example:
        >>> import holdfast as hf
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 2)).double().eval()
        >>> for p, value in zip(model.parameters(), (1.0, -0.5, [[1.0], [0.0]], [0.0, 0.1])):
        ...     _ = p.data.copy_(torch.tensor(value))
        >>> found = exact_margin(model, torch.full((1, 1), 0.75).double(), torch.tensor([0]), hf.Linf(0.1))
        >>> found.status, round(float(found.margin), 4)
        (('certified',), 0.05)
    """
    given = {"time_limit": time_limit, "max_binaries": max_binaries}
    get("certify", "milp").check(threat if isinstance(threat, Threat) else None, given)
    check_precision(x)
    check_task(model, x, y, threat)
    return _solve(model, x, y, threat, time_limit=time_limit, max_binaries=max_binaries, verdict=False)


@torch.no_grad()
def _solve(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, time_limit: float, max_binaries: int, verdict: bool
) -> MilpResult:
    # In float64 from here on: bounds and coefficients hold the model's own weights, also those that it computes.
    graph = doubled(in_pieces(trace(copy.deepcopy(model).cpu(), x.cpu(), threat), maxima=False))
    check_layers(graph)
    inputs = region(threat, x, sound=True)
    box = Region(inputs.lower.double().cpu(), inputs.upper.double().cpu(), x.double().cpu())
    relaxed = linear.relaxation(graph, box, slopes="adaptive", hidden=True, sound=True)
    margins = linear.margin_bounds(relaxed, y.cpu())
    rounding = evaluation_error(graph, relaxed.intervals, x.dtype)
    rounding = rounding.gather(1, y.cpu()[:, None])[:, 0] + rounding.amax(1)
    batch = _Batch(model, x, y.cpu(), threat, skeleton(graph), relaxed.intervals, margins, rounding)
    found = [_one_input(batch, i, time_limit, max_binaries, verdict=verdict) for i in range(len(x))]
    return MilpResult(
        tuple(one.status for one in found),
        torch.tensor([one.margin for one in found], dtype=torch.float64, device=x.device),
        torch.tensor([one.slack for one in found], dtype=torch.float64, device=x.device),
        torch.tensor([one.exact for one in found], device=x.device),
        torch.stack([x[i] if one.x_adv is None else one.x_adv for i, one in enumerate(found)]),
        torch.tensor([one.binaries for one in found], device=x.device),
        torch.tensor([one.nodes for one in found], device=x.device),
        torch.tensor([one.seconds for one in found], dtype=torch.float64, device=x.device),
    )


@dataclass(frozen=True, eq=False)
class _Batch:
    """What is known before the solver starts: `margins` (B, K) are CROWN's; `rounding` is (B,)."""

    model: nn.Module
    x: Tensor
    y: Tensor
    threat: Threat
    base: Skeleton
    intervals: list[Interval]
    margins: Tensor
    rounding: Tensor

    def counter_example(self, i: int, point: Tensor) -> tuple[float, Tensor] | None:
        """Margin and place of the point as the model itself takes it, in the threat set of input i, if it is broken."""
        candidate = self.x.clone()
        candidate[i] = point.to(self.x)
        candidate = self.threat.project(candidate, self.x)
        logits, label = self.model(candidate[i : i + 1])[0], int(self.y[i])
        if int(logits.argmax()) == label or not bool(self.threat.contains(candidate, self.x)[i]):
            return None
        return float(logits[label] - logits.max()), candidate[i]

    def margin_at(self, i: int, point: Tensor) -> float:
        """Margin of input i at a point, by the graph in float64."""
        logits, label = self.base.graph.forward(point[None])[0], int(self.y[i])
        others = torch.cat([logits[:label], logits[label + 1 :]])
        return float(logits[label] - others.max())


@dataclass(eq=False)
class _One:
    """The state of the search for one input.

    `bounds` (K,) are the lower bounds of the margins proved so far, `best` is the smallest margin at a point of the
    set; `x_adv` is the counter-example with the smallest margin, `reached`. The search ends within `gap` of the best.
    """

    bounds: Floats
    verdict: bool
    slack: float = math.inf
    gap: float = 0.0
    binaries: int = 0
    best: float = math.inf
    x_adv: Tensor | None = None
    reached: float = math.inf
    nodes: int = 0
    seconds: float = 0.0

    @property
    def margin(self) -> float:
        return min(float(self.bounds.min()), self.best)

    @property
    def exact(self) -> bool:
        return self.best - self.margin <= self.gap

    @property
    def status(self) -> Status:
        if self.x_adv is not None:
            return "broken"
        return "certified" if self.margin > self.slack else "unknown"

    def visit(self, batch: _Batch, i: int, point: Tensor) -> None:
        """Note the margin at a point, and the point itself if it is the worst counter-example so far."""
        margin = batch.margin_at(i, point)
        self.best = min(self.best, margin)
        if margin > self.slack or margin >= self.reached:
            return
        found = batch.counter_example(i, point)
        if found is not None and found[0] < self.reached:
            self.reached, self.x_adv = found

    def open(self, bound: float) -> bool:
        """Can a part of the program with this lower bound still change the answer?"""
        if self.verdict:
            return self.x_adv is None and self.best > self.slack >= bound
        return bound < self.best - self.gap


def _one_input(batch: _Batch, i: int, time_limit: float, max_binaries: int, *, verdict: bool) -> _One:
    start = clock.now()
    margins, label = batch.margins[i].numpy(), int(batch.y[i])
    # A bound that overflowed proves nothing.
    one = _One(np.where(np.isfinite(margins), margins, -np.inf), verdict)
    one.bounds[label] = np.inf
    one.visit(batch, i, batch.x[i].double().cpu())
    intervals = [(low[i].numpy(), high[i].numpy()) for low, high in batch.intervals]
    if not all(np.isfinite(end).all() for pair in intervals for end in pair):
        return one
    one.slack, one.binaries = float(batch.rounding[i]), _unstable(batch.base.graph, intervals)
    if one.binaries <= max_binaries and not clock.over():
        task = program(batch.base, intervals)
        logits = batch.base.columns[-1]
        one.binaries = task.binaries
        one.gap = GAP * float(np.maximum(-task.floor[logits], task.ceiling[logits]).max())
        lp = scale(task)
        if task.binaries <= max_binaries and lp.usable:
            with clock.until(start + time_limit):
                for j in one.bounds.argsort().tolist():
                    if j != label:
                        _search(batch, i, j, lp, one)
    one.seconds = clock.now() - start
    return one


def _unstable(graph: Graph, intervals: list[tuple[Floats, Floats]]) -> int:
    """Activations that are not linear over the box: each takes a binary, so that many need no program to be built."""
    seen = [intervals[node.inputs[0]] for node in graph.nodes if isinstance(node.op, ops.Activation)]
    return sum(int(((low < 0) & (high > 0)).sum()) for low, high in seen)


def _search(batch: _Batch, i: int, j: int, lp: Scaled, one: _One) -> None:
    """Branch and bound for the margin over class j: the part with the smallest bound first, until none is open."""
    task, binary = lp.task, np.flatnonzero(lp.task.integer)
    logits = batch.base.columns[-1]
    objective = np.zeros(len(task.floor))
    objective[logits[int(batch.y[i])]] += 1.0
    objective[logits[j]] -= 1.0
    closed, count = math.inf, itertools.count()
    # A node: its bound, a number that breaks ties, and the value of every binary, -1 where it is free.
    nodes = [(float(one.bounds[j]), next(count), np.full(len(binary), -1, dtype=np.int8))]
    while nodes and one.open(nodes[0][0]) and not clock.over():
        bound, _, choice = heapq.heappop(nodes)
        floor, ceiling = task.floor.copy(), task.ceiling.copy()
        floor[binary], ceiling[binary] = choice == 1, choice != 0
        found = relax(lp, objective, floor, ceiling)
        bound = max(bound, found.bound)
        one.nodes += 1
        if found.point is not None:
            inputs = found.point.clip(task.floor, task.ceiling)[batch.base.columns[0]]
            one.visit(batch, i, torch.from_numpy(inputs))
        at = _branching(lp, binary, choice, found)
        if at is None or not one.open(bound):
            closed = min(closed, bound)
            continue
        for value in (0, 1):
            child = choice.copy()
            child[at] = value
            heapq.heappush(nodes, (bound, next(count), child))
    one.bounds[j] = min(closed, nodes[0][0] if nodes else math.inf)


def _branching(lp: Scaled, binary: Indices, choice: NDArray[np.int8], found: Relaxed) -> int | None:
    """The free binary to branch on: far from 0 and 1, in rows with large multipliers. None if there is none."""
    if found.point is None or found.multipliers is None or not (choice < 0).any():
        return None
    value = found.point[binary].clip(0, 1)
    weight = (lp.weight @ np.abs(found.multipliers))[binary]
    # The small terms order the binaries that are whole already, or without a multiplier.
    score = (np.minimum(value, 1 - value) + 1e-9) * (weight + 1e-3 * weight.max())
    return int(np.where(choice < 0, score, -1.0).argmax())


def check_layers(graph: Graph) -> None:
    """Refuse a network that is not piecewise linear, or has a layer without an encoding."""
    for node in graph.nodes:
        op = node.op
        if isinstance(op, ops.Activation) and op.kind not in PIECEWISE:
            raise UnsupportedError(
                f"layer '{node.name}': the exact method needs a piecewise linear network and has no encoding for the "
                f"activation '{op.kind}'; it covers {', '.join(sorted(PIECEWISE))}, clippings, max pooling and MinMax. "
                f"Use {argument('method', 'crown')} or {argument('method', 'ibp')}, which bound it."
            )
        known = ops.Input | ops.Affine | ops.Activation | ops.MaxPool | ops.MinMax | ops.Add | ops.Reshape | ops.Concat
        if not isinstance(op, known):
            raise UnsupportedError(f"layer '{node.name}': the exact method has no encoding for {type(op).__name__}")
