"""Does a property hold? Look for a counter-example first, then bound, then split."""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.bounding.core.evaluation import doubled
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.complete.input_split import split_inputs
from holdfast.certificates.complete.problem import Answer, Conditions, Problem, is_late
from holdfast.certificates.complete.split_neurons import linear_bounds, split_neurons
from holdfast.checks import PROVABLE, check_logits, check_model
from holdfast.errors import InputError, UnsupportedError
from holdfast.properties.counterexamples import search
from holdfast.properties.points import Judge, Run, hull
from holdfast.properties.property import Case, Property, stacked
from holdfast.properties.vnnlib import load_property
from holdfast.results import Verdict
from holdfast.threats import Box
from holdfast.utils import clock
from holdfast.utils.options import Positive, Whole, check_options, options_of

FEW = 24
"""Inputs that vary, up to which splitting them comes before everything else."""
SHARE = 0.1
"""Of the time that is left, for a search for counter-examples; the proof also looks for them under way."""
SOME = 256
"""Inputs that vary, up to which splitting them is tried at all before neurons are split."""
INPUTS = {True: 0.6, False: 0.15}
"""Of the time that is left, for splitting inputs before neurons: where inputs are few, and where they are not."""


@dataclass(frozen=True)
class Effort:
    """How hard to look for counter-examples; see `search`."""

    samples: int
    starts: int
    steps: int
    rounds: int


QUICK, LONG = Effort(32, 16, 20, 1), Effort(128, 32, 50, 4)
"""For many inputs: before the bounds, and after bounds that decide nothing."""
THOROUGH = Effort(100_000, 64, 40, 2)
"""For few inputs, where points are cheap."""


def verify(
    model: nn.Module,
    prop: Property | str | Path,
    *,
    timeout: Positive = 60.0,
    input_shape: Sequence[int] | None = None,
    seed: Whole = 0,
    replays: Sequence[Run] = (),
) -> Verdict:
    """Decide whether a network has a property: proved, violated with a counter-example, or unknown in the time given.

    "holds" is proved for the network as it is run, in its own precision, rounding included. "violated" comes with an
    input that the model itself confirms.

    Args:
        model: from (B, ...) to outputs (B, K), in eval mode, on the CPU, in float32 or float64.
        prop: a property, or a VNN-LIB file.
        timeout: seconds for all of it.
        input_shape: shape of one input; known for ONNX models, else the values in a row.
        seed: of the search for counter-examples.
        replays: other ways to run the network, from (1, ...) to (1, K), that have to confirm a counter-example.

    Example:
        >>> import holdfast as hf
        >>> from holdfast.properties import Case, Polytope
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU()).eval()
        >>> with torch.no_grad():
        ...     _ = model[0].weight.fill_(2.0), model[0].bias.fill_(-1.0)
        >>> def above(limit):  # is there an output of at least `limit` for an input between 0 and 1?
        ...     return hf.Property([Case([0.0], [1.0], [Polytope([[-1.0]], [-limit])])])
        >>> hf.verify(model, above(1.5)).status, hf.verify(model, above(0.5)).status
        ('holds', 'violated')
    """
    start = clock.now()
    given = {"timeout": timeout, "seed": seed}
    check_options({name: option for name, option in options_of(verify).items() if name in given}, given, "verify")
    asked = prop if isinstance(prop, Property) else load_property(prop)
    subject = _subject(model, asked, input_shape)
    deadline = start + timeout
    bound, splits, notes, late = math.inf, 0, [], None
    for i, case in enumerate(asked.cases):
        if case.empty:
            notes.append("the region of inputs is empty" if len(asked.cases) == 1 else f"region {i} is empty")
            continue
        until = clock.now() + (deadline - clock.now()) / (len(asked.cases) - i)
        answer, judge = _decide(subject, case, until, int(seed), tuple(replays))
        bound, splits = min(bound, answer.bound), splits + answer.splits
        if answer.status == "violated":
            assert answer.point is not None
            note = _boundary(subject, judge, answer.point)
            return Verdict("violated", answer.point, judge.output, bound, splits, clock.now() - start, note)
        if answer.status == "unknown":  # another case may still have a counter-example
            late = bool(late) or clock.now() >= until
        if clock.now() >= deadline and i + 1 < len(asked.cases):
            late = True
            break
    seconds = clock.now() - start
    if late is not None:
        note = "out of time" if late else "no method that fits the network decides it"
        return Verdict("unknown", None, None, bound, splits, seconds, note, late)
    return Verdict("holds", None, None, bound, splits, seconds, "; ".join(notes))


@dataclass(frozen=True, eq=False)
class _Subject:
    """A network that fits the property: in its own precision, and in float64."""

    model: nn.Module
    double: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype

    def graphs(self, case: Case) -> tuple[Graph, Graph]:
        """The network as operations, in float64 and in its own dtype; compared with the model over the box."""
        lower, upper = (end.view(1, *self.shape) for end in hull(case, self.dtype))
        radius = (upper - lower)[0] / 2
        low, high = float(lower.min()) - 1, float(upper.max()) + 1
        x = (lower + upper) / 2
        own = trace(self.model, x.to(self.dtype), Box(radius.to(self.dtype), low=low, high=high))
        return doubled(own), own


def _subject(model: nn.Module, prop: Property, input_shape: Sequence[int] | None) -> _Subject:
    """The network, after all checks that it fits the property."""
    check_model(model)
    kinds = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()} or {torch.float32}
    places = {t.device.type for t in (*model.parameters(), *model.buffers())} or {"cpu"}
    if len(kinds) > 1 or not kinds <= set(PROVABLE) or places != {"cpu"}:
        raise UnsupportedError(
            f"verify takes a network in float32 or float64 on the CPU; this one is in {sorted(map(str, kinds))} on "
            f"{sorted(places)}"
        )
    dtype = kinds.pop()
    shape = tuple(input_shape if input_shape is not None else getattr(model, "input_shape", (prop.inputs,)))
    if math.prod(shape) != prop.inputs:
        raise InputError(
            f"{prop.name} has {prop.inputs} inputs X, the network takes {math.prod(shape)} values {shape}; they must "
            "be the same"
        )
    middle = ((prop.cases[0].lower + prop.cases[0].upper) / 2).to(dtype).view(1, *shape)
    with torch.no_grad():
        outputs = check_logits(nn.Sequential(model, nn.Flatten()).eval(), middle).shape[1]
        flat = model(middle.clone()).ndim == 2
    model = model if flat else nn.Sequential(model, nn.Flatten()).eval()
    if prop.outputs is not None and prop.outputs != outputs:
        raise InputError(f"{prop.name} has {prop.outputs} outputs Y, the network {outputs}; they must be the same")
    return _Subject(model, copy.deepcopy(model).double(), shape, dtype)


def _decide(
    subject: _Subject, case: Case, deadline: float, seed: int, replays: tuple[Run, ...]
) -> tuple[Answer, Judge]:
    """The answer for one case, and the judge of its counter-examples."""
    free = [polytope for polytope in case.unsafe if not len(polytope.rows)]
    conditions = Conditions(*stacked(case.unsafe)) if case.unsafe and not free else _nothing()
    judge = Judge(subject.model, case, conditions, subject.shape, subject.dtype, replays)
    if free:
        any_point = judge.place(((case.lower + case.upper) / 2).view(1, *subject.shape))[0]
        judge.output = subject.model(any_point[None])[0].detach()
        return Answer("violated", -math.inf, 0, any_point), judge
    if not case.unsafe:
        return Answer("holds", math.inf), judge
    graph, own = subject.graphs(case)
    lower, upper = (end.view(1, *subject.shape) for end in hull(case, subject.dtype))
    x = (lower + upper) / 2 if case.centre is None else case.centre.view(1, *subject.shape)
    problem = Problem(graph, own, Region(lower, upper, x, case.ball), conditions, subject.dtype, judge.check)
    return _solved(problem, judge, deadline, seed), judge


def _solved(problem: Problem, judge: Judge, deadline: float, seed: int) -> Answer:
    """Attack, bound, attack harder, then split inputs and neurons, in the order that suits the number of inputs."""
    inputs = int((problem.region.upper > problem.region.lower).sum())
    few = inputs <= FEW
    point = _searched(judge, deadline, QUICK, seed)
    root = None if point is not None else linear_bounds(problem, deadline)
    if root is not None:
        if root.answer.status == "holds":
            return root.answer
        point = _searched(judge, deadline, THOROUGH if few else LONG, seed + 1)
    if point is not None:
        return Answer("violated", -math.inf, 0 if root is None else 1, point)
    before = _unknown()
    if inputs <= SOME:
        now = clock.now()
        before = split_inputs(problem, now + INPUTS[few] * (deadline - now))
        if before.status != "unknown":
            return before
    root = linear_bounds(problem, deadline) if root is None else root
    after = _unknown() if root is None else split_neurons(problem, root, deadline)
    if after.status == "unknown" and not is_late(deadline):
        after = split_inputs(problem, deadline)  # there is no neuron left to split
    return replace(after, bound=max(before.bound, after.bound), splits=before.splits + after.splits)


def _unknown() -> Answer:
    return Answer("unknown", -math.inf)


def _searched(judge: Judge, deadline: float, effort: Effort, seed: int) -> Tensor | None:
    now = clock.now()
    return search(judge, now + SHARE * (deadline - now), seed=seed, **asdict(effort))


def _nothing() -> Conditions:
    return Conditions(torch.zeros(0, 1).double(), torch.zeros(0).double(), torch.zeros(0, dtype=torch.int64))


def _boundary(subject: _Subject, judge: Judge, point: Tensor) -> str:
    """A note if rounding decides whether the point is a counter-example."""
    if judge.output is None or not judge.conditions.groups:
        return ""
    exact = subject.double(point[None].double())
    both = torch.cat([judge.conditions.least(z[None] if z.ndim == 1 else z) for z in (judge.output, exact.detach())])
    off = float((both[0] - both[1]).abs())
    if float(both.max()) >= -max(off, 1e-6 * float(judge.output.abs().max())):
        return "the counter-example is on the boundary, within rounding"
    return ""
