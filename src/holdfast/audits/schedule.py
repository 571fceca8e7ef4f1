"""The plan carried out: each step on each threat, within the time there is, and what came of it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from holdfast.attacks.core.indicators import Indicator
from holdfast.audits import evidence, search
from holdfast.audits.bracket import Bracket, Record
from holdfast.audits.inputs import to_numpy
from holdfast.audits.job import Job
from holdfast.audits.plan import LARGEST, Plan, Step
from holdfast.audits.reach import half_proved
from holdfast.audits.rows import Example, Outcome
from holdfast.audits.side import Side
from holdfast.certificates.core.hidden_values import hidden_values
from holdfast.errors import UnsupportedError
from holdfast.utils import clock

GALLERY = 1000  # inputs whose pictures are kept for the report
WORK, PROBES = 0.85, 0.95  # shares of the time after which the steps and the probes end; the report gets the rest

Pair = tuple[int, Step, Side]
"""A step, with its number in the plan, on a threat that it fits."""


def carry_out(job: Job, plan: Plan, named: set[str], began: float) -> tuple[Bracket, ...]:
    """Run what there is time for; return one bracket for each threat.

    Args:
        job: the audit.
        plan: the steps.
        named: methods that the user named; one that does not fit the model is an error, others are left out.
        began: when the audit was called, by the clock in use.
    """
    limit = math.inf if plan.seconds is None else plan.seconds
    began -= job.store.wall()
    with clock.until(began + limit):
        clean = search.classify(job)
        with clock.until(began + WORK * limit):
            late = _pass(job, plan, named)
        for step, side, count in late:
            text = f"{step.name}: no time for {count} of {len(side.right)} inputs that are classified right"
            if text not in side.skipped:  # a plan has several steps of one method, each with more time
                side.skipped.append(text)
        with clock.until(began + PROBES * limit):
            share = clock.left() / len(job.sides)  # at least a tenth of the limit, more if the steps ended early
            trust = [evidence.trust(job, side, share) for side in job.sides]
        return tuple(_bracket(job, side, clean, signs, plan) for side, signs in zip(job.sides, trust, strict=True))


def _pass(job: Job, plan: Plan, named: set[str]) -> list[tuple[Step, Side, int]]:
    """Run each step on each threat that it fits, one after the other, until the deadline.

    Returns:
        The steps that ran out of time, and for how many inputs.
    """
    pairs = [(i, step, side) for i, step in enumerate(plan.steps, 1) for side in job.sides if step.fits(side.threat)]
    hidden = hidden_values(job.model, job.take(torch.tensor([0]))[0]) if any(s.square for _, s, _ in pairs) else 0
    # Where time is short, the first attacks look at the largest budget of all inputs before any looks at smaller ones.
    for number, step, side in takewhile(lambda pair: pair[1].stage == "attack", pairs if plan.seconds else ()):
        search.attack(job, side, number, step, test=False, top=True)
    late = []
    for number, step, side in pairs:
        if step.widest is not None and job.x[0].numel() > step.widest:
            continue  # made for other inputs: there is nothing that was left out
        if step.square and hidden > step.largest:
            reach, instead = ("a search can end", step.method) if step.complete else ("linear bounds pay", "crown")
            size = f"the network has {hidden:,} hidden values, and {reach} up to {step.largest:,}"
            text = f"{step.name}: {size}; `certify='{instead}'` tries it all the same"
            if text not in side.skipped:  # a method may have several steps
                side.skipped.append(text)
            continue
        if plan.seconds is not None and step.method == "auto" and hidden > LARGEST:
            step = replace(step, method="ibp", options={})  # linear bounds would take the time of the attacks
        step = replace(step, batch=step.at_once(hidden))
        try:
            count = _run_step(job, plan, (number, step, side))
        except UnsupportedError as error:
            if step.method in named - {"auto"} or step.stage == "attack":
                raise
            side.skipped.append(f"{step.name}: it does not fit this model ({error})")
            continue
        if count:
            late.append((step, side, count))
    return late


def _run_step(job: Job, plan: Plan, pair: Pair) -> int:
    """Search the levels; return how many inputs there was no time for."""
    number, step, side = pair
    if step.stage == "attack":
        return search.attack(job, side, number, step, test=plan.tests(number, side.threat))
    count = search.certify(job, side, number, step)
    if count < max(1, len(side.right)):
        side.tried.add(step.method)
    return count


def _bracket(job: Job, side: Side, clean: Mapping[int, Outcome], trust: tuple[Indicator, ...], plan: Plan) -> Bracket:
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
        steps=job.store.steps(side.number, [step.name for step in plan.steps], side.sizes[-1]),
        reach=half_proved(job, side, plan),
    )


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
