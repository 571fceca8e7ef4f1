"""The exact smallest margin of a piecewise linear network over a box, by mixed-integer programming.

The solver is HiGHS, through scipy. It works in float64 with tolerances; see `_slack` for what is held back for them.
"""

import copy
import math
import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

from holdfast.bounds import linear, ops
from holdfast.bounds.graph import trace
from holdfast.bounds.interval import ULPS, Interval
from holdfast.bounds.ops import Graph, evaluate
from holdfast.bounds.region import Region, region
from holdfast.bounds.relax import PIECEWISE
from holdfast.bounds.rounding import gamma, underflow, unit
from holdfast.certify.milp_model import Floats, Program, Skeleton, program, skeleton
from holdfast.checks import check_task
from holdfast.errors import InputError, UnsupportedError
from holdfast.registry import get, register
from holdfast.results import CertifyResult
from holdfast.threats import Threat

Status = Literal["certified", "broken", "unknown"]

EARLY = 0.9
"""Relative gap at which HiGHS may stop where only the verdict counts: with a positive value p at the best point it
then drops every branch whose bound is above (1 - EARLY) p > 0, and is done as soon as the margin is proven positive."""


@dataclass(frozen=True, eq=False)
class MilpResult:
    """What the solver found out about each input.

    Attributes:
        status: "certified" (the margin is positive, by more than `slack`), "broken" (`x_adv` is misclassified) or
            "unknown" (out of time, too many binaries, or within the slack of zero).
        margin: (B,) float64. The smallest margin min_j z_y - z_j over the threat set where `exact`, else a lower bound.
        slack: (B,) float64. What tolerances of the solver and rounding of the model can make of it.
        exact: (B,) bool. Solved to optimality.
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


@register(
    "certify",
    "milp",
    summary="exact: mixed-integer programming decides every input of a small piecewise linear network, given time",
    guarantee="proof",
    threats=("linf", "box"),
    reference="Tjeng et al., Evaluating robustness of neural networks with mixed integer programming, 2019",
)
def milp(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, time_limit: float = 60.0, max_binaries: int = 2000
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
    margin = found.margin - found.slack
    # The conversion to the model's dtype may round up: move down by more than that first.
    margin = (margin - 2 * unit(x.dtype) * margin.abs().nan_to_num(posinf=0.0)).to(x)
    margin = margin.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    certified = torch.tensor([s == "certified" for s in found.status], device=x.device) & (margin > 0)
    return CertifyResult(certified, margin, by=tuple("milp" if c else "" for c in certified.tolist()))


def exact_margin(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, time_limit: float = 60.0, max_binaries: int = 2000
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
    get("certify", "milp").check(threat if isinstance(threat, Threat) else None, {})
    check_task(model, x, y, threat)
    return _solve(model, x, y, threat, time_limit=time_limit, max_binaries=max_binaries, verdict=False)


@torch.no_grad()
def _solve(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, time_limit: float, max_binaries: int, verdict: bool
) -> MilpResult:
    if not time_limit > 0 or max_binaries < 0:
        raise InputError(f"time_limit must be > 0 and max_binaries >= 0, got {time_limit} and {max_binaries}")
    # In float64 from here on, so that bounds and coefficients hold the model's own weights without a further rounding.
    graph = trace(copy.deepcopy(model).double().cpu(), x.double().cpu())
    check_layers(graph)
    inputs = region(threat, x, sound=True)
    box = Region(inputs.lower.double().cpu(), inputs.upper.double().cpu(), x.double().cpu())
    relaxed = linear.relaxation(graph, box, slopes="adaptive", hidden=True, sound=True)
    margins = linear.margin_bounds(relaxed, y.cpu()).scatter(1, y.cpu()[:, None], torch.inf)
    rounding = evaluation_error(graph, relaxed.intervals, x.dtype)
    rounding = rounding.gather(1, y.cpu()[:, None])[:, 0] + rounding.amax(1)
    batch = _Batch(model, x, y, threat, skeleton(graph), relaxed.intervals, margins, rounding)
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
    """What is known before the solver starts: `margins` (B, K) are CROWN's, infinite at y; `rounding` is (B,)."""

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


@dataclass(eq=False)
class _One:
    """The state of the search for one input.

    `bounds` (K,) are the lower bounds of the margins proved so far, `best` the smallest of those solved to optimality;
    `x_adv` is the counter-example with the smallest margin, `reached`.
    """

    bounds: Floats
    slack: float
    binaries: int = 0
    x_adv: Tensor | None = None
    reached: float = math.inf
    solved: set[int] = field(default_factory=set)
    best: float = math.inf
    nodes: int = 0
    seconds: float = 0.0

    @property
    def margin(self) -> float:
        return float(self.bounds.min())

    @property
    def exact(self) -> bool:
        return self.margin == math.inf or int(self.bounds.argmin()) in self.solved

    @property
    def status(self) -> Status:
        if self.x_adv is not None:
            return "broken"
        return "certified" if self.margin > self.slack else "unknown"

    def consider(self, found: tuple[float, Tensor] | None) -> None:
        """Keeps the counter-example if it is worse than the one before."""
        if found is not None and found[0] < self.reached:
            self.reached, self.x_adv = found

    def open(self, j: int, *, verdict: bool) -> bool:
        """Can class j still change the answer? For the exact margin: can it lie below the smallest one found?"""
        if verdict:
            return self.x_adv is None and bool(self.bounds[j] <= self.slack)
        return j not in self.solved and bool(self.bounds[j] < self.best)


def _one_input(batch: _Batch, i: int, time_limit: float, max_binaries: int, *, verdict: bool) -> _One:
    start = time.monotonic()
    # A bound that overflowed proves nothing.
    one = _One(np.nan_to_num(batch.margins[i].numpy().copy(), nan=-np.inf, posinf=np.inf, neginf=-np.inf), math.inf)
    one.consider(batch.counter_example(i, batch.x[i]))
    intervals = [(low[i].numpy(), high[i].numpy()) for low, high in batch.intervals]
    if all(np.isfinite(end).all() for pair in intervals for end in pair):
        task = program(batch.base, intervals)
        one.slack, one.binaries = _slack(task, float(batch.rounding[i])), task.binaries
        if task.binaries <= max_binaries:
            _search(batch, i, task, one, start + time_limit, verdict=verdict)
    one.seconds = time.monotonic() - start
    return one


def _search(batch: _Batch, i: int, task: Program, one: _One, deadline: float, *, verdict: bool) -> None:
    """Class by class, the weakest bound first: the relaxation, then the whole program, as far as it is needed."""
    logits, label = batch.base.columns[-1], int(batch.y[i])
    gaps = (EARLY, 0.0) if verdict else (0.0,)
    for j in one.bounds.argsort().tolist():
        objective = np.zeros(len(task.floor))
        objective[[logits[label], logits[j]]] = 1.0, -1.0
        for gap in (None, *gaps) if j != label else ():
            if not one.open(j, verdict=verdict) or time.monotonic() >= deadline:
                break
            answer = _minimise(task, objective, gap, deadline - time.monotonic())
            one.nodes += answer.nodes
            one.bounds[j] = max(one.bounds[j], answer.bound)
            if answer.optimal:
                one.solved.add(j)
                one.best = min(one.best, answer.bound)
            if answer.point is not None:
                one.consider(batch.counter_example(i, torch.from_numpy(answer.point[batch.base.columns[0]])))


@dataclass(frozen=True, eq=False)
class _Answer:
    """A proven lower bound of the minimum, whether it is the minimum, and the best point found."""

    bound: float
    optimal: bool
    point: Floats | None
    nodes: int


def _minimise(task: Program, objective: Floats, gap: float | None, seconds: float) -> _Answer:
    """Minimises objective @ v; gap None leaves out the integrality."""
    whole = gap is not None and task.binaries > 0
    found = optimize.milp(
        objective,
        integrality=task.integer if whole else None,
        bounds=optimize.Bounds(task.floor, task.ceiling),
        constraints=optimize.LinearConstraint(task.matrix, task.lower, task.upper),
        options={"time_limit": max(seconds, 1e-3), "mip_rel_gap": gap or 0.0},
    )
    done = found.status == 0
    claimed = found.mip_dual_bound if whole else found.fun if done else None
    # x itself is always a solution: an answer that says otherwise is numerical trouble, and proves nothing.
    trusted = found.status in (0, 1) and claimed is not None and math.isfinite(claimed)
    bound = float(claimed or 0.0) if trusted else -math.inf
    exact = done and (task.binaries == 0 or (whole and gap == 0.0))
    return _Answer(bound, exact, found.x, int(found.mip_node_count or 0))


def _slack(task: Program, rounding: float) -> float:
    """What may be wrong with a bound of the solver, and with a margin that the model computes.

    HiGHS accepts violated rows and fractional binaries within its tolerances; that only lowers the minimum it finds.
    Its bounds err on the other side through reduced costs of the wrong sign, up to 1e-7 each (the dual feasibility
    tolerance), which cost at most that times the range of the column; and a branch is given up when it cannot improve
    by 1e-6 (the absolute gap). `rounding` is what evaluation in the model's own dtype adds.
    """
    return 1e-6 + 1e-7 * float((task.ceiling - task.floor).sum()) + rounding


def check_layers(graph: Graph) -> None:
    """Refuse a network that is not piecewise linear, or has a layer without an encoding."""
    for node in graph.nodes:
        op = node.op
        if isinstance(op, ops.Activation) and op.kind not in PIECEWISE:
            raise UnsupportedError(
                f"layer '{node.name}': the exact method needs a piecewise linear network and has no encoding for the "
                f"activation '{op.kind}'; it covers {', '.join(sorted(PIECEWISE))}, max pooling and MinMax. Use "
                "method='crown' or method='ibp', which bound it."
            )
        known = ops.Input | ops.Affine | ops.Activation | ops.MaxPool | ops.MinMax | ops.Add | ops.Reshape | ops.Concat
        if not isinstance(op, known):
            raise UnsupportedError(f"layer '{node.name}': the exact method has no encoding for {type(op).__name__}")


def evaluation_error(graph: Graph, intervals: list[Interval], dtype: torch.dtype) -> Tensor:
    """By how much logits computed in `dtype` can miss those of real arithmetic, (B, K).

    Errors are passed forward: an affine layer turns e into |A| e and adds gamma (|A| |z| + |b|); activations, maxima
    and pair sorting are 1-Lipschitz in the largest error of what they see.
    """
    u = unit(dtype)
    errors = [torch.zeros_like(intervals[0][0])]
    for i, node in enumerate(graph.nodes[1:], start=1):
        given = [errors[k] for k in node.inputs]
        size = torch.maximum(intervals[i][0].abs(), intervals[i][1].abs())
        match node.op:
            case ops.Affine():
                low, high = intervals[node.inputs[0]]
                reach = node.op.apply_abs(torch.maximum(low.abs(), high.abs()) + given[0])
                reach = reach if node.op.bias_abs is None else reach + node.op.bias_abs
                g, tiny = gamma(node.op.terms, dtype), underflow(node.op.terms, dtype)
                errors.append(node.op.apply_abs(given[0]) + g * reach + tiny)
            case ops.Activation():
                # Below zero, and there are often many such neurons, only the slope's share of the error gets through.
                above = (intervals[node.inputs[0]][1] + given[0]).clamp(min=0)
                slope = node.op.parameter
                passed = slope * given[0] + (1 - slope) * torch.minimum(given[0], above)
                errors.append(passed + 2 * ULPS * u * (size + passed))
            case ops.MinMax():
                errors.append(given[0].unflatten(1, (-1, 2)).amax(2).repeat_interleave(2, 1))
            case ops.Add():
                errors.append(given[0] + given[1] + 2 * u * (size + given[0] + given[1]))
            case _:
                errors.append(evaluate(node.op, given))
    return errors[-1]
