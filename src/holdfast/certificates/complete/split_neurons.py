"""Decide output conditions over a region by branch and bound on hidden neurons, for networks with many inputs.

The conditions become a last layer: its first output is 0 and output j is minus the excess of row j over its limit. A
group of conditions is impossible where one of its rows has a positive excess, that is, where output 0 stays above one
of the group's outputs; so the search for robustness (`root`) decides any conditions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.bounding.core.region import Region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.certificates.complete.branch_and_bound import Effort
from holdfast.certificates.complete.pieces import in_pieces
from holdfast.certificates.complete.problem import Answer, Conditions, Problem
from holdfast.certificates.complete.root import Network, State, begin, tighten_and_split
from holdfast.certificates.complete.zonotope import covers
from holdfast.errors import OutOfTime
from holdfast.utils import clock

SEARCH = Effort(width=256)
STEPS = 5
"""Of the descent from the point where a part's bound is attained."""
STARTS = 8
"""Points of a batch from which it begins."""


@dataclass(frozen=True, eq=False)
class Root:
    """What linear bounds say of the whole region.

    Attributes:
        network: the network with the conditions as its last layer.
        box: the region in the network's own precision.
        state: of one input.
        exact: the relaxation in float64.
    """

    network: Network
    box: Region
    state: State
    exact: Relaxation

    @property
    def answer(self) -> Answer:
        """What is known so far; never "violated"."""
        bound = float(self.state.excess.min())
        return Answer("holds" if bound > 0 else "unknown", bound, 1 + int(self.state.parts))


@torch.no_grad()
def interval_bounds(problem: Problem) -> Answer:
    """What intervals say of the whole region: cheap, and for more operations than lines cover. Never "violated"."""
    graph = with_rows(problem.graph, problem.conditions, torch.float64)
    box = in_dtype(problem.region, problem.dtype).double()
    r = linear.relaxation(graph, box, slopes=None, hidden=False, sound=True, runs_in=problem.dtype)
    excess = -r.intervals[-1][1][:, 1:]
    excess = torch.where(excess.isfinite(), excess, -torch.inf)  # an overflow proves nothing
    bound = float(problem.conditions.worst(excess).amin())
    return Answer("holds" if bound > 0 else "unknown", bound, 1)


@torch.no_grad()
def linear_bounds(problem: Problem, deadline: float) -> Root | None:
    """CROWN on the whole region; None if there was no time for it, or if it has no rule for an operation."""
    own, double = (in_pieces(graph, maxima=False) for graph in (problem.own, problem.graph))
    if not covers(double):
        return None
    conditions = problem.conditions
    network = Network(
        with_rows(own, conditions, problem.dtype),
        with_rows(double, conditions, torch.float64),
        members(conditions) + 1,
    )
    box = in_dtype(problem.region, problem.dtype)
    try:
        with clock.until(deadline):
            state, exact = begin(network, box, torch.zeros(1, dtype=torch.int64))
    except OutOfTime:
        return None
    return Root(network, box, state, exact)


@torch.no_grad()
def split_neurons(problem: Problem, root: Root, deadline: float) -> Answer:
    """Optimise the slopes, then split neurons, until the problem is decided or the time is over."""
    seeds = _Seeds(problem)
    state, label = root.state, torch.zeros(1, dtype=torch.int64)
    limit = float(state.seconds[0]) + deadline - clock.now()
    try:
        with clock.until(deadline):
            tighten_and_split(root.network, root.exact, root.box, label, label, state, seeds.visit, SEARCH, limit)
    except OutOfTime:
        pass
    if seeds.found is not None:
        return Answer("violated", root.answer.bound, root.answer.splits, seeds.found)
    return root.answer


def members(conditions: Conditions) -> Tensor:
    """The rows of each group, (groups, rows of the largest one); a smaller group repeats its first row."""
    sizes = torch.bincount(conditions.group, minlength=conditions.groups)
    order = conditions.group.argsort(stable=True)
    first = sizes.cumsum(0) - sizes
    place = torch.arange(int(sizes.max()))[None]
    return order[first[:, None] + torch.where(place < sizes[:, None], place, 0)]


def with_rows(graph: Graph, conditions: Conditions, dtype: torch.dtype) -> Graph:
    """The network followed by 0 and minus the excesses of the conditions."""
    weight = torch.cat([torch.zeros_like(conditions.rows[:1]), -conditions.rows]).to(dtype)
    bias = torch.cat([torch.zeros_like(conditions.limits[:1]), conditions.limits]).to(dtype)
    last = Node(ops.Linear(weight, bias), (len(graph.nodes) - 1,), "conditions", (len(weight),))
    return Graph((*graph.nodes, last))


class _Seeds:
    """Looks for counter-examples from the points at which the bounds of parts are attained."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.found: Tensor | None = None

    def visit(self, inputs: Tensor, points: Tensor) -> Tensor:
        """(inputs (N,), all 0, points (N, *shape)) -> (N,) bool: was a counter-example found?"""
        region, conditions = self.problem.region, self.problem.conditions
        points = points.to(self.problem.dtype)
        for step in range(STEPS + 1):
            x = points.detach().requires_grad_(step < STEPS)
            with torch.enable_grad():
                output = self.problem.own.forward(x).double()
                excess = output @ conditions.rows.T - conditions.limits
                each = conditions.worst(excess).amin(1)
            order = each.detach().argsort()
            hits = order[each[order] <= 0]
            if len(hits):
                self.found = self.problem.check(points[hits].double())
            if self.found is not None or step == STEPS:
                break
            order = order[:STARTS]
            (gradient,) = torch.autograd.grad(each, x, torch.ones_like(each))
            width = (region.upper - region.lower).to(points)
            points = points[order] - 0.25 * 0.5**step * width * gradient[order].sign()
            points = torch.minimum(torch.maximum(points, region.lower.to(points)), region.upper.to(points))
        return torch.full_like(inputs, self.found is not None, dtype=torch.bool)


def in_dtype(region: Region, dtype: torch.dtype) -> Region:
    """The region in the dtype of the network, not smaller."""
    lower, upper = _outward(region.lower, dtype, -torch.inf), _outward(region.upper, dtype, torch.inf)
    x = region.x.to(dtype)
    threat = region.threat if torch.equal(x.double(), region.x) else None  # a ball must not move: else its box
    return Region(lower, upper, x, threat)


def _outward(end: Tensor, dtype: torch.dtype, way: float) -> Tensor:
    """The end of a box (1, *shape) in `dtype`, not inside of the exact one."""
    near = end.to(dtype)
    inside = near.double() > end if way < 0 else near.double() < end
    return torch.where(inside, torch.nextafter(near, torch.full_like(near, way)), near)
