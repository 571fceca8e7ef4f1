"""Input splitting: cut the box of inputs until every part is decided. For networks with few inputs.

All parts are bounded in batches. A part that may hold a counter-example is cut down to where the planes below the
conditions, and intervals from the conditions back to the inputs, allow one, then halved along the input that moves the
conditions most (gradient times width). The parts with the
worst bounds come first. (Wang et al., "Formal security analysis of neural networks using symbolic intervals", 2018; the
cuts as in Zhou et al., "Clip-and-verify", 2025.)
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from holdfast.bounding import interval
from holdfast.bounding.core.evaluation import doubled
from holdfast.bounding.core.region import Region, region
from holdfast.bounding.core.rounding import below, unit
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.complete.contract import contract
from holdfast.certificates.complete.pieces import in_pieces
from holdfast.certificates.complete.problem import Answer, Conditions, Problem, is_late
from holdfast.certificates.complete.smear import smear
from holdfast.certificates.complete.sub_boxes import Bounded, bounded, cut
from holdfast.certificates.complete.zonotope import check_rules, covers, values_of
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.utils import clock
from holdfast.utils.options import Positive

BATCH = 128
"""Boxes that are bounded at a time: as many as stay in the cache."""
VALUES = 2**24
"""Numbers in the generators of a batch, at most; a box that needs more is not split."""
POOL = 2**18
"""Open boxes from which on the best bounds come first, which ends them sooner and keeps the memory flat."""


OTHERS = 1e-3
"""Weight of the rows that need not be proved, in the choice of the input to split."""
CAP = 2.0
"""Times the slope of its chord, what an unstable ReLU counts for at most in the choice of the input to split."""
LIMIT = 1e-9
"""Margin that is proved, relative to the largest logit of the input: strictly more than a tie."""


@Certificate(
    "input-split",
    summary="exact for networks with few inputs: splits the box until every part is decided, given time",
    threats=("linf", "box"),
    reference="Wang et al., Formal security analysis of neural networks using symbolic intervals, 2018",
    complete=True,
)
def input_split(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, time_limit: Positive = 10.0
) -> CertifyResult:
    """Certified if every part of the box is proved, by splitting inputs; for networks with up to about ten inputs.

    Prefer it where CROWN leaves an input open and the input has few values; with many, `milp` splits neurons instead.
    An input that is not decided in time is not certified. `margin` is a lower bound and, where the box was split,
    hardly above zero: the search stops as soon as the verdict is known.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: Linf or Box.
        time_limit: seconds for each input.
    """
    graph = doubled(in_pieces(trace(copy.deepcopy(model).cpu(), x.cpu(), threat), maxima=False))
    check_rules(graph)
    whole = region(threat, x, sound=True)
    parts = Region(whole.lower.double().cpu(), whole.upper.double().cpu(), x.double().cpu())
    margins, x_adv = [], x.clone()
    for i, label in enumerate(y.tolist()):
        problem = _robust(model, graph, parts.select(torch.tensor([i])), label, x[i : i + 1])
        answer = split_inputs(problem, clock.now() + time_limit)
        margins.append(answer.bound + float(problem.conditions.limits[0]))
        if answer.point is not None:
            x_adv[i] = answer.point.to(x)
    margin = torch.tensor(margins, dtype=torch.float64)
    margin = below(margin, x.dtype).to(x)
    decided = (margin > 0) | (x_adv != x).flatten(1).any(1)
    by = tuple("input-split" if known else "" for known in decided.tolist())
    return CertifyResult(margin > 0, margin, by=by, x_adv=x_adv)


def _robust(model: nn.Module, graph: Graph, region: Region, label: int, x: Tensor) -> Problem:
    """The problem that one of the other logits reaches the label's, up to LIMIT; x (1, ...) is the input itself."""
    classes = graph.nodes[-1].shape[0]
    one_hot = torch.eye(classes, dtype=torch.float64)
    others = [j for j in range(classes) if j != label]
    limit = LIMIT * float(graph.forward(region.x).abs().max())
    rows, count = one_hot[label] - one_hot[others], len(others)
    limits = torch.full((count,), limit, dtype=torch.float64)

    def check(points: Tensor) -> Tensor | None:
        logits = model(points.to(x))
        wrong = (logits.argmax(1) != label).nonzero()
        return points[wrong[0, 0]] if len(wrong) else None

    return Problem(graph, graph, region, Conditions(rows, limits, torch.arange(count)), x.dtype, check)


@torch.no_grad()
def split_inputs(problem: Problem, deadline: float) -> Answer:
    """Decide a problem over a box; "unknown" where the network is too large or has an operation without a rule."""
    graph, conditions = in_pieces(problem.graph, maxima=False), problem.conditions
    problem = replace(problem, graph=graph)
    lower, upper = problem.region.lower.flatten(1), problem.region.upper.flatten(1)
    each = values_of(graph, int((upper > lower).sum()))
    if each > VALUES or not covers(graph):
        return Answer("unknown", -torch.inf)
    batch = min(BATCH, VALUES // each)
    pool = _Pool(lower, upper, torch.full((1,), -torch.inf, dtype=torch.float64))
    splits, least = 0, torch.inf
    while len(pool.bound) and not is_late(deadline):
        low, high = pool.take(batch)
        found = bounded(graph, low, high, conditions, problem.dtype)
        splits += len(low)
        bound = conditions.worst(found.excess).amin(1).nan_to_num(nan=-torch.inf)
        open_ = (bound <= 0).nonzero()[:, 0]
        if not len(open_):
            least = min(least, float(bound.min()))
            continue
        least = 0.0  # a cut leaves out what may come as close as that
        found, low, high, bound = found.select(open_), low[open_], high[open_], bound[open_]
        point, row = _probed(problem, low, high, found)
        if point is not None:
            return Answer("violated", float(torch.cat([bound, pool.bound]).min()), splits, point)
        low, high = cut(low, high, found, conditions)
        if conditions.groups == 1:
            low, high = contract(graph, low, high, conditions, problem.dtype)
        some = (low <= high).all(1)
        low, high, bound, found, row = low[some], high[some], bound[some], found.select(some), row[some]
        moves = _moves(problem, found, low, high, row)
        left = _halves(low, high, moves, bound, 4 * unit(problem.dtype))
        if left is None:
            return Answer("unknown", float(torch.cat([bound, pool.bound]).min()), splits)
        pool.add(*left)
    return Answer("unknown", float(pool.bound.min()), splits) if len(pool.bound) else Answer("holds", least, splits)


class _Pool:
    """Open boxes, with the bound of the box each was cut from."""

    def __init__(self, lower: Tensor, upper: Tensor, bound: Tensor) -> None:
        self.lower, self.upper, self.bound = lower, upper, bound

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """Remove the boxes to look at next."""
        if len(self.bound) <= count:
            chosen = torch.arange(len(self.bound))
        else:
            chosen = self.bound.topk(count, largest=len(self.bound) > POOL).indices
        low, high = self.lower[chosen], self.upper[chosen]
        keep = torch.ones(len(self.bound), dtype=torch.bool)
        keep[chosen] = False
        self.lower, self.upper, self.bound = self.lower[keep], self.upper[keep], self.bound[keep]
        return low, high

    def add(self, lower: Tensor, upper: Tensor, bound: Tensor) -> None:
        """Put boxes back."""
        self.lower, self.upper = torch.cat([self.lower, lower]), torch.cat([self.upper, upper])
        self.bound = torch.cat([self.bound, bound])


def _largest(values: Tensor, found: Bounded, conditions: Conditions) -> Tensor:
    """For each box the row with the largest of the values (B, M) in the group with the worst bound, (B,)."""
    worst = conditions.worst(found.excess).argmin(1)
    own = conditions.group[None] == worst[:, None]
    return torch.where(own, values, -torch.inf).argmax(1)


def _probed(problem: Problem, low: Tensor, high: Tensor, found: Bounded) -> tuple[Tensor | None, Tensor]:
    """Run the network at the centre of each box and at the lowest corner of the plane with the best bound.

    Returns a counter-example, if one of the points is confirmed, and for each box the row to prove: of the group with
    the worst bound the one that stays largest at both points. A row that is met somewhere in the box cannot be proved
    on it, however tight its bound is.
    """
    conditions, count = problem.conditions, len(low)
    slopes = found.slopes[torch.arange(count), _largest(found.excess, found, conditions)]
    points = torch.cat([(low + high) / 2, torch.where(slopes > 0, low, high)]).view(-1, *problem.graph.nodes[0].shape)
    excess = problem.graph.forward(points) @ conditions.rows.T - conditions.limits
    row = _largest(torch.minimum(excess[:count], excess[count:]), found, conditions)
    least = conditions.worst(excess).amin(1)
    order = least.argsort()
    hits = order[least[order] <= 0]
    return problem.check(points[hits]) if len(hits) else None, row


def _moves(problem: Problem, found: Bounded, low: Tensor, high: Tensor, row: Tensor) -> Tensor:
    """How much each input moves the row (B,) to prove, relative to the most; and, of its group, the rows as a whole.

    The other rows count where the row itself moves with all inputs alike.
    """
    conditions, shape, width = problem.conditions, problem.graph.nodes[0].shape, high - low
    now = interval.propagate(problem.graph, low.view(-1, *shape), high.view(-1, *shape), sound=False)
    both = zip(found.intervals, now, strict=True)
    known = [(torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1])) for a, b in both]
    group, total = conditions.group[row], torch.zeros_like(width)
    for m in range(len(conditions.rows)):
        mine = (group == conditions.group[m]).nonzero()[:, 0]
        if not len(mine):
            continue
        some = [(start[mine], end[mine]) for start, end in known]
        moves = smear(problem.graph, some, conditions.rows[m].expand(len(mine), -1), CAP)
        share = moves / (moves * width[mine]).amax(1, keepdim=True).clamp(min=1e-300)
        total[mine] += torch.where((row[mine] == m)[:, None], share, OTHERS * share)
    return total


def _halves(
    low: Tensor, high: Tensor, moves: Tensor, bound: Tensor, finest: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Boxes (B, n) halved along the input that moves the worst row most; None if one has become too small for it.

    A box that holds only neighbouring numbers of the network's dtype and is still open is decided by rounding.

    Args:
        low: (B, n).  high: (B, n).
        moves: (B, n), bounds of the gradient.
        bound: (B,), kept with both halves.
        finest: width of a box, relative to its numbers, that is not halved any more.
    """
    middle = (low + high) / 2
    width = high - low
    score = torch.where(width > finest * torch.maximum(low.abs(), high.abs()), moves * width, -1.0)
    best, axis = score.max(1)
    if bool((best < 0).any()):
        return None
    at = axis[:, None]
    half = middle.gather(1, at)
    lower = torch.cat([low, low.scatter(1, at, half)])
    upper = torch.cat([high.scatter(1, at, half), high])
    return lower, upper, torch.cat([bound, bound])
