"""The plan carried out: each step on each threat, within the time there is, and what came of it."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from holdfast.audits import evidence, search
from holdfast.audits.bracket import Bracket, Record
from holdfast.audits.inputs import to_numpy
from holdfast.audits.job import Job
from holdfast.audits.plan import LARGEST, Plan, Step
from holdfast.audits.rows import Example, Outcome
from holdfast.audits.side import Side
from holdfast.bounding.graph.ops import Activation, MaxPool, MinMax
from holdfast.bounding.graph.trace import trace
from holdfast.errors import UnsupportedError

GALLERY = 1000  # inputs whose pictures are kept for the report

Pair = tuple[int, Step, Side]
"""A step, with its number in the plan, on a threat that it fits."""


def carry_out(job: Job, plan: Plan, named: set[str]) -> tuple[Bracket, ...]:
    """Run what there is time for; return one bracket for each threat.

    Args:
        named: methods that the user named; one that does not fit the model is an error, others are left out.
    """
    limit = math.inf if plan.seconds is None else plan.seconds
    deadline = time.perf_counter() - job.store.wall() + limit
    clean = search.classify(job)
    numbered = enumerate(plan.steps, 1)
    pairs = [(number, step, side) for number, step in numbered for side in job.sides if step.fits(side.threat)]
    late = _pass(job, plan, pairs, named, deadline)
    if late and time.perf_counter() < deadline:  # what the shares of the others left over
        late = _pass(job, plan, [pair for pair, _ in late], named, deadline)
    for (_, step, side), count in late:
        text = f"no time for {count} of {len(side.right)} inputs that are classified right"
        side.skipped.append(f"{step.name}: {text}")
    return tuple(_bracket(job, side, clean) for side in job.sides)


def _pass(job: Job, plan: Plan, pairs: list[Pair], named: set[str], deadline: float) -> list[tuple[Pair, int]]:
    """Run each step on each threat, with an equal share of the time that is left.

    Returns:
        The pairs that ran out of time, and for how many inputs.
    """
    hidden = hidden_values(job.model, job.take(torch.tensor([0]))[0]) if any(s.square for _, s, _ in pairs) else 0
    late = []
    for done, (number, step, side) in enumerate(pairs):
        if step.square and hidden > LARGEST:
            size = f"the network has {hidden:,} hidden values, and linear bounds pay up to {LARGEST:,}"
            side.skipped.append(f"{step.name}: {size}; `certify='crown'` tries it all the same")
            continue
        step = replace(step, batch=step.at_once(hidden))
        now = time.perf_counter()
        until = now + max(0.0, deadline - now) / (len(pairs) - done)
        try:
            count = _run_step(job, plan, (number, step, side), until)
        except UnsupportedError as error:
            if step.method in named - {"auto"} or step.stage == "attack":
                raise
            side.skipped.append(f"{step.name}: it does not fit this model ({error})")
            continue
        if count:
            late.append(((number, step, side), count))
    return late


def _run_step(job: Job, plan: Plan, pair: Pair, until: float) -> int:
    """Search the levels; return how many inputs there was no time for."""
    number, step, side = pair
    if step.stage == "attack":
        return search.attack(job, side, number, step, until, test=plan.tests(number, side.threat))
    count = search.certify(job, side, number, step, until)
    side.tried.add(step.method)
    return count


def _bracket(job: Job, side: Side, clean: Mapping[int, Outcome]) -> Bracket:
    trust = evidence.trust(job, side)  # before the times are read: it adds its own
    shown = slice(side.finer - 1, None, side.finer)
    return Bracket(
        threat=str(side.threat),
        threats=tuple(map(str, side.levels[shown])),
        budgets=side.sizes[shown],
        valid_range=(side.threat.low, side.threat.high),
        records=_records(job.y, side, clean),
        seconds=job.store.seconds(side.number),
        trust=trust,
        skipped=tuple(side.skipped),
        proved=bool(side.tried),
        examples=_examples(job, side, clean),
    )


def hidden_values(model: nn.Module, x: Tensor) -> int:
    """How many values the activations of the network take for one input; 0 if bounds cannot look into it anyway."""
    try:
        graph = trace(model, x)
    except UnsupportedError:
        return 0
    return sum(prod(node.shape) for node in graph.nodes if isinstance(node.op, Activation | MaxPool | MinMax))


def _records(labels: Tensor, side: Side, clean: Mapping[int, Outcome]) -> tuple[Record, ...]:
    """One bracket per input."""
    rows = []
    for position, outcome in clean.items():
        prediction, label = int(outcome.prediction or 0), int(labels[position])
        if not outcome.passed:
            rows.append(Record(position, label, prediction, None, "", 0.0, "clean", None))
            continue
        radius, certificate = side.proved.get(position, (0.0, ""))
        broken = side.broken.get(position, Outcome(position, True))
        rows.append(Record(position, label, prediction, radius, certificate, broken.size, broken.by, broken.prediction))
    return tuple(rows)


def _examples(job: Job, side: Side, clean: Mapping[int, Outcome]) -> tuple[Example, ...]:
    """Pictures for the report: of the smallest examples first, then of the inputs that hold."""
    order = sorted(side.broken, key=lambda position: (side.broken[position].size, position))
    broken = job.store.examples(side.number, order[:GALLERY])
    known = evidence.explained(job, side, broken[: evidence.EXPLAINED])
    held = [position for position in clean if position not in side.broken][: GALLERY - len(broken)]
    rest = tuple(Example(position, to_numpy(job.x[position])) for position in held)
    return (*known, *broken[evidence.EXPLAINED :], *rest)
