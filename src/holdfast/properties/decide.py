"""Does a property hold? Look for a counter-example first, then bound, then split."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.bounding.graph.once import trace_once
from holdfast.certificates.complete.input_split import split_inputs
from holdfast.certificates.complete.problem import Answer, Problem, is_late
from holdfast.certificates.complete.split_neurons import interval_bounds, linear_bounds, split_neurons
from holdfast.errors import UnsupportedError
from holdfast.properties.asked import Subject, conditions_of, subject_of
from holdfast.properties.counterexamples import search
from holdfast.properties.points import Judge, Run
from holdfast.properties.property import Case, Property
from holdfast.properties.together import bounded_together
from holdfast.properties.vnnlib import load_property
from holdfast.results import Verdict
from holdfast.utils import clock
from holdfast.utils.options import Positive, Whole, check_options, options_of

FEW = 24
"""Inputs that vary, up to which splitting them comes before everything else."""
SHARE = 0.1
"""Of the time that is left, for a search for counter-examples; the proof also looks for them under way."""
SOME = 256
"""Inputs that vary, up to which splitting them is tried at all before neurons are split."""
FIRST, SECOND = 0.05, 0.5
"""Of the time that is left, for the first linear bounds: before the long search, and after it if they were not done."""
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
    known = options_of(verify)
    check_options({name: known[name] for name in given}, given, "call of verify")
    asked = prop if isinstance(prop, Property) else load_property(prop)
    subject = subject_of(model, asked, input_shape)
    notes = [
        "the region of inputs is empty" if len(asked.cases) == 1 else f"region {i} is empty"
        for i, case in enumerate(asked.cases)
        if case.empty
    ]
    cases = [case for case in asked.cases if not case.empty]
    with trace_once(subject.model):
        answers = bounded_together(subject, cases, start + timeout)
        found = _in_passes(subject, cases, answers, start + timeout, int(seed), tuple(replays))
    bound, splits = min((a.bound for a in answers), default=math.inf), sum(answer.splits for answer in answers)
    seconds = clock.now() - start
    if found is not None:
        note = _boundary(subject, found.judge, found.point)
        return Verdict("violated", found.point, found.judge.output, bound, splits, seconds, note)
    open_ = [answer for answer in answers if answer.status == "unknown"]
    if open_:
        late = any(answer.late for answer in open_)
        why = next((answer.note for answer in open_ if answer.note), "no method that fits the network decides it")
        return Verdict("unknown", None, None, bound, splits, seconds, "out of time" if late else why, late)
    return Verdict("holds", None, None, bound, splits, seconds, "; ".join(notes))


@dataclass(frozen=True, eq=False)
class _Found:
    """A counter-example, and the judge that confirmed it."""

    point: Tensor
    judge: Judge


def _in_passes(
    subject: Subject, cases: Sequence[Case], answers: list[Answer], deadline: float, seed: int, replays: tuple[Run, ...]
) -> _Found | None:
    """Decide the open cases one after the other, each in its share of the time; those that need more get another try.

    Updates the answers; returns the first counter-example.
    """
    left = [i for i, answer in enumerate(answers) if answer.status == "unknown"]
    while left:
        for number, i in enumerate(left):
            until = clock.now() + (deadline - clock.now()) / (len(left) - number)
            answer, judge = _decide(subject, cases[i], until, seed, replays)
            late = answer.status == "unknown" and is_late(until)
            answers[i] = replace(
                answer,
                bound=max(answer.bound, answers[i].bound) if answer.status == "unknown" else answer.bound,
                splits=answer.splits + answers[i].splits,
                late=late,
            )
            if answer.point is not None:
                return _Found(answer.point, judge)
            if is_late(deadline):
                return None
        left = [i for i in left if answers[i].late]
    return None


def _decide(subject: Subject, case: Case, deadline: float, seed: int, replays: tuple[Run, ...]) -> tuple[Answer, Judge]:
    """The answer for one case, and the judge of its counter-examples."""
    conditions = conditions_of(case)
    judge = Judge(subject.model, case, conditions, subject.shape, subject.dtype, replays)
    if not case.unsafe:
        return Answer("holds", math.inf), judge
    if not len(conditions.rows):  # any output is a counter-example
        any_point = judge.place(((case.lower + case.upper) / 2).view(1, *subject.shape))[0]
        judge.output = subject.model(any_point[None])[0].detach()
        return Answer("violated", -math.inf, 0, any_point), judge
    try:
        graph, own = subject.graphs(*subject.box([case]))
    except UnsupportedError as error:
        return _searched_only(judge, deadline, seed, str(error)), judge
    problem = Problem(graph, own, subject.region(case), conditions, subject.dtype, judge.check)
    return _solved(problem, judge, deadline, seed), judge


def _searched_only(judge: Judge, deadline: float, seed: int, why: str) -> Answer:
    """Look for counter-examples in half of the time: there is no proof, and `why` says why."""
    half = clock.now() + 0.5 * (deadline - clock.now())
    for tries in itertools.count():
        point = search(judge, half, seed=seed + tries, **asdict(LONG if tries else QUICK))
        if point is not None:
            return Answer("violated", -math.inf, 0, point)
        if is_late(half) or bool((judge.low == judge.high).all()):
            return Answer("unknown", -math.inf, note=f"no proof is possible: {why}")
    raise AssertionError  # itertools.count() does not end


def _solved(problem: Problem, judge: Judge, deadline: float, seed: int) -> Answer:
    """Attack, bound, attack harder, then split inputs and neurons, in the order that suits the number of inputs."""
    inputs = int((problem.region.upper > problem.region.lower).sum())
    few = inputs <= FEW
    before, root, point = _unknown(), None, _searched(judge, deadline, QUICK, seed)
    if point is None:
        before = interval_bounds(problem)
        if before.status != "holds":
            root = linear_bounds(problem, clock.now() + FIRST * (deadline - clock.now()))
            before = before if root is None else root.answer
        if before.status == "holds":
            return before
        point = _searched(judge, deadline, THOROUGH if few else LONG, seed + 1)
    if point is not None:
        return Answer("violated", -math.inf, before.splits, point)
    if root is None:
        root = linear_bounds(problem, clock.now() + SECOND * (deadline - clock.now()))
        if root is not None and root.answer.status == "holds":
            return root.answer
    if inputs <= SOME:
        now = clock.now()
        before = split_inputs(problem, now + INPUTS[few] * (deadline - now))
        if before.status != "unknown":
            return before
    after = _unknown() if root is None else split_neurons(problem, root, deadline)
    if after.status == "unknown" and not is_late(deadline):
        after = split_inputs(problem, deadline)  # there is no neuron left to split
    return replace(after, bound=max(before.bound, after.bound), splits=before.splits + after.splits)


def _unknown() -> Answer:
    return Answer("unknown", -math.inf)


def _searched(judge: Judge, deadline: float, effort: Effort, seed: int) -> Tensor | None:
    now = clock.now()
    return search(judge, now + SHARE * (deadline - now), seed=seed, **asdict(effort))


def _boundary(subject: Subject, judge: Judge, point: Tensor) -> str:
    """A note if rounding decides whether the point is a counter-example."""
    if judge.output is None or not judge.conditions.groups:
        return ""
    exact = subject.double(point[None].double())
    both = torch.cat([judge.conditions.least(z[None] if z.ndim == 1 else z) for z in (judge.output, exact.detach())])
    off = float((both[0] - both[1]).abs())
    if float(both.max()) >= -max(off, 1e-6 * float(judge.output.abs().max())):
        return "the counter-example is on the boundary, within rounding"
    return ""
