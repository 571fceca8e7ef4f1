"""The plan carried out: each step on each threat, within the time there is, and what came of it."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.nature import Nature
from holdfast.audits import evidence, stages
from holdfast.audits.bracket import Bracket, Record
from holdfast.audits.inputs import to_numpy
from holdfast.audits.live import Live
from holdfast.audits.plan import LARGEST, Plan, Step
from holdfast.audits.stages import Job, Side
from holdfast.audits.store import Example, Outcome, Store
from holdfast.bounding.graph.ops import Activation, MaxPool, MinMax
from holdfast.bounding.graph.trace import trace
from holdfast.errors import UnsupportedError

GALLERY = 1000  # inputs whose pictures are kept for the report


@dataclass(eq=False)
class Rounds:
    """The steps of the plan on all threats; `began` is when the run would have started without a break."""

    sides: tuple[Side, ...]
    plan: Plan
    live: Live
    store: Store
    began: float
    right: tuple[int, ...] = ()
    inputs: int = 0
    hidden: int = 0

    def all(self, job: Job, named: set[str]) -> tuple[Bracket, ...]:
        """Runs what there is time for; one bracket for each threat."""
        self.inputs = len(job.x)
        if any(step.square for step in self.plan.steps):
            self.hidden = hidden_values(job.model, job.take(torch.tensor([0]))[0])
        clean = stages.classify(job, self.sides[0])
        right = [position for position, outcome in clean.items() if outcome.passed]
        self.right = tuple(right)
        pairs = [(number, step, side) for number, step in enumerate(self.plan.steps, 1) for side in self.sides]
        pairs = [(n, step, side) for n, step, side in pairs if step.fits(side.threat)]
        late = self._pass(job, pairs, right, named)
        if late and self._left() > 0:  # what the shares of the others left over
            late = self._pass(job, [(n, step, side) for n, step, side, _ in late], right, named)
        for _, step, side, count in late:
            side.skipped.append(f"{step.name}: no time for {count} of {len(right)} inputs that are classified right")
        return tuple(self._bracket(job, side, clean, right) for side in self.sides)

    def _pass(
        self, job: Job, pairs: list[tuple[int, Step, Side]], right: list[int], named: set[str]
    ) -> list[tuple[int, Step, Side, int]]:
        """Each step on each threat, with an equal share of the time that is left; those that ran out of it."""
        late = []
        for done, (number, step, side) in enumerate(pairs):
            if step.square:
                if self.hidden > LARGEST:
                    size = f"the network has {self.hidden:,} hidden values, and linear bounds pay up to {LARGEST:,}"
                    side.skipped.append(f"{step.name}: {size}; `certify='crown'` tries it all the same")
                    continue
                step = replace(step, batch=step.at_once(self.hidden))
            until = time.perf_counter() + max(0.0, self._left()) / (len(pairs) - done)
            try:
                if step.stage == "certify":
                    count = stages.certify(job, side, number, step, right, until)
                    side.tried.add(step.method)
                else:
                    test = self.plan.tests(number, side.threat)
                    count = stages.attack(job, side, number, step, right, until, test=test)
            except UnsupportedError as error:
                if step.method in named - {"auto"} or step.stage == "attack":
                    raise
                side.skipped.append(f"{step.name}: it does not fit this model ({error})")
                continue
            if count:
                late.append((number, step, side, count))
        return late

    def _left(self) -> float:
        """Seconds until the time limit."""
        limit = math.inf if self.plan.seconds is None else self.plan.seconds
        return self.began + limit - time.perf_counter()

    def _bracket(self, job: Job, side: Side, clean: dict[int, Outcome], right: list[int]) -> Bracket:
        probed = torch.tensor(right[: evidence.PROBED], dtype=torch.long)
        broken = [position in side.broken for position in probed.tolist()]
        self.show("trust", 0, len(probed))
        task = (*job.take(probed), side.threat.select(probed))
        trust = evidence.trust(job.store, side.number, job.model, *task, broken, seed=job.seed, nature=job.nature)
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

    def show(self, step: str, done: int, total: int) -> None:
        """Tells whoever looks at the folder how far the run has come."""
        self.live.show(step=step, done=done, total=total, seconds=self.store.wall(), brackets=self._brackets())

    def finish(self) -> None:
        """The same for the end."""
        self.live.end("finished", seconds=self.store.wall(), brackets=self._brackets())

    def _brackets(self) -> list[dict[str, Any]]:
        return [
            {
                "threat": str(side.threat),
                "budget": side.sizes[-1],
                "inputs": self.inputs,
                "clean": len(self.right),
                "certified": sum(side.proved.get(position, (0.0, ""))[0] >= side.sizes[-1] for position in self.right),
                "attacked": sum(position not in side.broken for position in self.right),
            }
            for side in self.sides
        ]


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
    known = broken[: evidence.EXPLAINED]
    index = torch.tensor([example.position for example in known], dtype=torch.long)
    if job.nature == Nature():
        known = evidence.explained(job.model, *job.take(index), side.threat, known)
    held = [position for position in clean if position not in side.broken][: GALLERY - len(broken)]
    rest = tuple(Example(position, to_numpy(job.x[position])) for position in held)
    return (*known, *broken[evidence.EXPLAINED :], *rest)
