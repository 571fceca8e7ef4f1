"""The steps of an audit: classify, certify by bisection over the budgets, attack from the largest down, doubt.

Budgets are nested, which saves work and keeps the answers consistent: a proof at a larger budget also counts at the
smaller ones, an example found at a smaller budget also counts at the larger ones. Each step works on the budgets that
those before it left open. The first attack also looks at what is certified: it is the test of the certificate.

No step looks twice at one level of one input: what it looked at bounds where it looks next, whatever the store says was
found there. So every search ends.
"""

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor, nn

from holdfast.attacks.core.nature import Nature
from holdfast.audits.engine import Engine
from holdfast.audits.evidence import unsound
from holdfast.audits.inputs import to_model
from holdfast.audits.plan import Step
from holdfast.audits.store import Key, Outcome, Store
from holdfast.audits.task import Found, Stage, Task
from holdfast.errors import SoundnessError, StorageError
from holdfast.registry import get
from holdfast.threats import Threat

LEARNED = 250  # inputs that an attack may learn from: a few seconds for a small network
PROBE = 50  # inputs that tell whether the largest level is worth being tried first
_WAY_OUT = "It was changed after it was written: restore it from a copy, or delete the file to start again."
_LAST_DIGITS = 1e-6  # of a size: below that, an example and a radius do not contradict each other


@dataclass(frozen=True, eq=False)
class Side:
    """One threat of an audit under way. Level 0 is the unchanged input, level i is `levels[i - 1]`.

    Attributes:
        number: of the bracket.
        levels: nested threats, growing; `sizes` are their budgets as numbers.
        finer: every so many levels there is one that is shown. Proofs are looked for at all of them, examples at those
            that are shown: their sizes are continuous anyway.
        proved: for each position, the largest radius proved and the certificate.
        broken: for each position, the smallest example found.
        skipped: what was not done, and why.
        tried: whether a certificate was run.
    """

    number: int
    levels: tuple[Threat, ...]
    sizes: tuple[float, ...]
    finer: int = 1
    proved: dict[int, tuple[float, str]] = field(default_factory=dict)
    broken: dict[int, Outcome] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)

    @property
    def threat(self) -> Threat:
        """The largest one."""
        return self.levels[-1]

    def within(self, grid: tuple[float, ...], position: int) -> tuple[int, int]:
        """Largest level of a grid of sizes that is proved, from 1, and smallest one that is broken, if only beyond."""
        outcome = self.broken.get(position)
        broken = len(grid) if outcome is None else bisect_left(grid, outcome.size or 0.0)
        return bisect_right(grid, self.proved.get(position, (0.0, ""))[0]), broken + 1

    def note(self, stage: Stage, outcome: Outcome) -> None:
        """Takes up what a step found out."""
        size, position = outcome.size or 0.0, outcome.position
        if stage == "certify" and size > self.proved.get(position, (0.0, ""))[0]:
            self.proved[position] = (size, outcome.by)
        known = self.broken.get(position)
        if stage == "attack" and not outcome.passed and (known is None or size < (known.size or 0.0)):
            self.broken[position] = outcome

    def contradicted(self, position: int) -> bool:
        """Whether an example lies where a proof says that there is none."""
        if position not in self.proved or position not in self.broken:
            return False
        radius, size = self.proved[position][0], self.broken[position].size or 0.0
        proved, broken = self.within(self.sizes, position)
        return broken <= proved or size < radius * (1 - _LAST_DIGITS)


@dataclass(frozen=True, eq=False)
class Job:
    """One audit under way.

    Attributes:
        model: from (B, ...) to logits (B, K).  x, y: all inputs and labels.
        store: where results are kept as they come.
        engine: where batches are worked on.
        bars: shown to the user.
        show: called after each batch with the step, how many inputs are done, and of how many.
        seed: of the attacks.  batch_size: inputs worked on, and stored, at a time.
        folder: that of the run, or None if the user keeps none.
        alpha: probability that a proof is wrong, where it is not zero.
        nature: what is known of the model.
        draws: passes that make up one prediction of a model that draws random numbers; 0 for any other.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    store: Store
    engine: Engine
    bars: Progress
    show: Callable[[str, int, int], None]
    seed: int
    batch_size: int
    folder: Path | None
    alpha: float | None = None
    nature: Nature = Nature()  # noqa: RUF009  (frozen)
    draws: int = 0

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions, where the model is and in its dtype."""
        return to_model(self.model, self.x[index], self.y[index])

    def run(
        self, key: Key, stage: Stage, name: str, step: Step | None, side: Side, wanted: list[int], until: float
    ) -> dict[int, Outcome]:
        """Does one step at one level for the wanted inputs that are not stored yet; all outcomes that are stored then.

        Batches are cut before those that are stored are left out, so a killed run goes on with the batches that it
        would have had. None is begun that would not end at `until`, going by the one before.
        """
        stored = self.store.outcomes(key)
        most = min(self.batch_size, (step and step.batch) or self.batch_size)
        chunks = [wanted[start : start + most] for start in range(0, len(wanted), most)]
        todo = [left for chunk in chunks if (left := [p for p in chunk if p not in stored])]
        text = f"{name} {side.levels[key.level - 1]}" if key.level else name
        done = len(wanted) - sum(map(len, todo))
        bar = self.bars.add_task(text, total=len(wanted), completed=done)
        last, mark = 0.0, time.perf_counter()

        def tasks() -> Iterator[Task]:
            for positions in todo:
                if time.perf_counter() + last > until:
                    return
                index = torch.tensor(positions)
                yield self._task(stage, step, side, key.level, index)

        for _, found in self.engine(self.model, tasks()):
            for outcome in found.outcomes:
                side.note(stage, outcome)
                if side.contradicted(outcome.position):
                    raise self._unsound(side, outcome.position, found)
            now = time.perf_counter()
            last, wall, mark = found.seconds, min(found.seconds, now - mark), now
            self.store.add(key, name, found.outcomes, found.examples, seconds=found.seconds, wall=wall)
            done += len(found.outcomes)
            self.bars.advance(bar, len(found.outcomes))
            self.show(text, done, len(wanted))
        after = self.store.outcomes(key)
        return {position: after[position] for position in wanted if position in after}

    def _unsound(self, side: Side, position: int, found: Found) -> SoundnessError:
        proof, outcome = side.proved[position], side.broken[position]
        examples = (*found.examples, *self.store.examples(side.number, [position]))
        label = int(self.y[position])
        return unsound(self.folder, label, proof, outcome, examples, side.threat, alpha=self.alpha)

    def _task(self, stage: Stage, step: Step | None, side: Side, level: int, index: Tensor) -> Task:
        x, y = self.take(index)
        if step is None:
            return Task(stage, "", {}, self.seed, None, index, x, y, draws=self.draws)
        samples = stage == "certify" and "radii" in get("certify", step.method).options
        radii = side.sizes[: level - 1] if samples else ()
        threat, options = side.levels[level - 1].select(index), dict(step.options)
        if stage == "attack" and "data" in get("attack", step.method).options:
            options["data"] = self.take(torch.arange(min(LEARNED, len(self.x))))[0]
        size = side.sizes[level - 1]
        return Task(stage, step.method, options, self.seed, threat, index, x, y, size, radii, self.draws)


def classify(job: Job, side: Side) -> dict[int, Outcome]:
    """What the model says to the unchanged inputs, by position."""
    found = job.run(Key(0, 0, 0), "clean", "clean", None, side, list(range(len(job.x))), math.inf)
    for position, label in enumerate(job.y.tolist()):
        outcome = found[position]
        if outcome.passed != (outcome.prediction == label):
            raise StorageError(
                f"the audit store contradicts itself: input {position} of class {label} is said to be classified "
                f"{'right' if outcome.passed else 'wrong'}, as class {outcome.prediction}. {_WAY_OUT}"
            )
    return found


def certify(job: Job, side: Side, number: int, step: Step, right: list[int], until: float = math.inf) -> int:
    """Looks for the largest level that can be proved, all inputs at once; how many inputs there was no time for.

    A step that is `fine` halves the range of levels that are neither proved nor broken: a certificate that fails at one
    level is not tried at larger ones. A costly one goes up from what is proved, over the levels that are shown: it
    seldom gains more than one. Only where a third of the first inputs are proved at the largest level, that is tried
    first for all. One that samples settles all levels by one look at the largest, with one alpha.
    """
    once = "radii" in get("certify", step.method).options
    every = 1 if step.fine else side.finer
    grid = side.sizes[every - 1 :: every]
    top = len(grid)
    leap = None if not (once or step.fine) else once
    passed: dict[int, int] = {}
    failed: dict[int, int] = {}
    late: set[int] = set()
    while True:
        groups: dict[int, list[int]] = {}
        for position in right:
            low, high = side.within(grid, position)
            low, high = max(low, passed.get(position, low)), min(high, failed.get(position, high))
            if low + 1 >= high or position in late:
                continue
            first = high == top + 1 and (leap or (leap is None and len(groups.get(top, ())) < PROBE))
            if first or leap is not None:
                level = top if first else (low + high) // 2 if step.fine else low + 1
                groups.setdefault(level, []).append(position)
        if not groups and leap is not None:
            return len(late)
        for level, outcome in _look(job, side, number, step, groups, every, until, late):
            if outcome.passed:
                passed[outcome.position] = level
            else:
                failed[outcome.position] = 0 if once else level
        if leap is None:
            tried = groups.get(top, [])
            leap = 3 * sum(side.within(grid, position)[0] == top for position in tried) >= max(1, len(tried))


def attack(
    job: Job, side: Side, number: int, step: Step, right: list[int], until: float = math.inf, *, test: bool
) -> int:
    """Looks for the smallest level that breaks, all inputs at once; how many inputs there was no time for.

    At the largest level first: what holds there need not be tried at smaller ones, and the way back from an example to
    its input often leads through several levels. Then bisection. With `test`, the largest level that is proved is
    attacked too.
    """
    shown = side.sizes[side.finer - 1 :: side.finer]
    top = len(shown)
    held: dict[int, int] = {}
    fell: dict[int, int] = {}
    late: set[int] = set()
    while True:
        groups: dict[int, list[int]] = {}
        for position in right:
            proved, high = side.within(shown, position)
            low, high = max(held.get(position, 0), proved - test), min(high, fell.get(position, high))
            if low + 1 < high and position not in late:
                level = top if high == top + 1 else (low + high) // 2
                groups.setdefault(level, []).append(position)
        if not groups:
            return len(late)
        for level, outcome in _look(job, side, number, step, groups, side.finer, until, late):
            if outcome.passed:
                held[outcome.position] = level
            else:
                fell[outcome.position] = level


def _look(
    job: Job,
    side: Side,
    number: int,
    step: Step,
    groups: dict[int, list[int]],
    every: int,
    until: float,
    late: set[int],
) -> Iterator[tuple[int, Outcome]]:
    """Runs the step on each group at its level, of a grid that holds every so many levels; level and outcome of each.

    Inputs that there was no time for go to `late`.
    """
    for level, group in sorted(groups.items()):
        key = Key(side.number, number, level * every)
        outcomes = job.run(key, step.stage, step.name, step, side, group, until)
        late.update(position for position in group if position not in outcomes)
        for position in group:
            if position in outcomes:
                check_stored(step.stage, outcomes[position], side, key)
                side.note(step.stage, outcomes[position])
                if side.contradicted(position):
                    raise _contradiction(side, position)
                yield level, outcomes[position]


def check_stored(stage: Stage, outcome: Outcome, side: Side, key: Key) -> None:
    """Refuse an outcome that does not fit the level it is stored at: no step writes such a one."""
    size, budget = outcome.size, side.sizes[key.level - 1]
    if stage == "certify":
        right, text = not outcome.passed or (size is not None and size >= budget), "proved, but only up to"
    else:
        right, text = outcome.passed or (size is not None and size <= budget), "broken, but by an example of size"
    if not right:
        raise StorageError(
            f"the audit store contradicts itself: at {side.levels[key.level - 1]} input {outcome.position} is "
            f"{text} {size}. {_WAY_OUT}"
        )


def _contradiction(side: Side, position: int) -> StorageError:
    """A fresh outcome is compared with what is known before it is stored, so one of these two was stored before."""
    (radius, certificate), outcome = side.proved[position], side.broken[position]
    return StorageError(
        f"the audit store contradicts itself: input {position} is certified by '{certificate}' up to {radius:.6g} and "
        f"broken by '{outcome.by}' with an example of size {outcome.size:.6g}. {_WAY_OUT}"
    )
