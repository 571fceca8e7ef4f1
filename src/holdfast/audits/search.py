"""Where a step looks: which level of the budgets comes next for each input, until all of them are settled.

Budgets are nested, which saves work and keeps the answers consistent: a proof at a larger budget also counts at the
smaller ones, an example found at a smaller budget also counts at the larger ones. Each step works on the budgets that
those before it left open. The first attack also looks at what is certified: it is the test of the certificate.

No step looks twice at one level of one input: what it looked at bounds where it looks next, whatever the store says was
found there. So every search ends.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.audits.job import Job
from holdfast.audits.plan import Step
from holdfast.audits.promise import promise
from holdfast.audits.rows import Key, Outcome
from holdfast.audits.side import Side
from holdfast.errors import InputError, StorageError
from holdfast.utils import clock

PROBE = 50  # inputs that tell whether the largest level is worth being tried first
_WAY_OUT = "It was changed after it was written: restore it from a copy, or delete the file to start again."

Next = Callable[[int, int, int], int]
"""(low, high, top) -> level to look at next: above `low`, which passed, below `high`, which failed, at most `top`."""


def halve(low: int, high: int, top: int) -> int:
    """Halve the range of open levels."""
    return (low + high) // 2


def climb(low: int, high: int, top: int) -> int:
    """Go up by one level: for a costly certificate, which seldom gains more than one."""
    return low + 1


def top_first(then: Next) -> Next:
    """Look at the largest level before all others."""
    return lambda low, high, top: top if high == top + 1 else then(low, high, top)


@dataclass(frozen=True, eq=False)
class Search:
    """One step on one threat.

    Attributes:
        job: the audit.
        side: the threat.
        number: of the step in the plan, from 1.
        step: the certificate or attack.
        every: look at every `every`-th level.
        test: also look at the largest level that is proved.
        passed: for each position, the largest level that passed.
        failed: for each position, the smallest level that failed.
        late: positions that there was no time for.
        hopes: for each position, how promising it is, where the step is complete.
    """

    job: Job
    side: Side
    number: int
    step: Step
    every: int
    test: bool = False
    passed: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    hopes: dict[int, float] = field(default_factory=dict)

    @property
    def grid(self) -> tuple[float, ...]:
        """Sizes of the levels that are looked at."""
        return self.side.sizes[self.every - 1 :: self.every]

    def open(self, position: int) -> tuple[int, int] | None:
        """Levels below and above all that are still open for an input; None if none is."""
        proved, broken = self.side.within(self.grid, position)
        low = max(proved - self.test, self.passed.get(position, 0))
        high = min(broken, self.failed.get(position, broken))
        return None if low + 1 >= high or position in self.late else (low, high)

    def run(self, following: Next) -> int:
        """Look until no level is open, all inputs at once; return how many inputs there was no time for."""
        top = len(self.grid)
        while True:
            groups: dict[int, list[int]] = {}
            for position in self.side.right:
                if (span := self.open(position)) is not None:
                    groups.setdefault(following(*span, top), []).append(position)
            if not groups:
                return len(self.late)
            for level, group in sorted(groups.items()):
                self.look(level, group)

    def probe(self) -> bool:
        """Whether a third of the first inputs pass at the largest level, so that it is worth being tried first."""
        top, group = len(self.grid), self.top(PROBE)
        return 3 * sum(self.side.within(self.grid, p)[0] == top for p in group) >= max(1, len(group))

    def top(self, most: int | None = None) -> list[int]:
        """Look at the largest level of the first inputs of which it is open; return them."""
        top = len(self.grid)
        group = [p for p in self.side.right if (span := self.open(p)) is not None and span[1] == top + 1][:most]
        self.look(top, group)
        return group

    def sorted(self, key: Key, group: list[int]) -> list[int]:
        """The most promising inputs first, if the step is complete and has work left to do."""
        if not self.step.complete or self.job.store.outcomes(key).keys() >= set(group):
            return group
        unknown = [position for position in group if position not in self.hopes]
        self.hopes.update(promise(self.job, self.side.levels[key.level - 1], unknown))
        return sorted(group, key=lambda position: -self.hopes.get(position, -math.inf))

    def look(self, level: int, group: list[int]) -> None:
        """Run the step on a group of inputs at one level of the grid, and take up what it finds."""
        key = Key(self.side.number, self.number, level * self.every)
        if group and clock.over():  # nothing new, but what is stored counts
            outcomes = {p: outcome for p, outcome in self.job.store.outcomes(key).items() if p in group}
        else:
            outcomes = self.job.run(key, self.step, self.side, self.sorted(key, group)) if group else {}
        self.late.update(position for position in group if position not in outcomes)
        for position, outcome in outcomes.items():
            check_stored(self.step, outcome, self.side, key)
            self.side.note(self.step.stage, outcome)
            if self.side.contradicted(position):
                raise _contradiction(self.side, position)
            if outcome.passed:
                self.passed[position] = level
            else:
                self.failed[position] = 0 if self.step.settles_all_levels else level


def classify(job: Job) -> dict[int, Outcome]:
    """What the model says to the unchanged inputs, by position; notes which ones are right."""
    found = job.run(Key(0, 0, 0), None, job.sides[0], list(range(len(job.x))))
    if len(found) < len(job.x):
        raise InputError(
            f"the time is too short to look at each input once: {len(found)} of {len(job.x)} are classified. Give more "
            "time or fewer inputs."
        )
    for position, label in enumerate(job.y.tolist()):
        outcome = found[position]
        if outcome.passed != (outcome.prediction == label):
            raise StorageError(
                f"the audit store contradicts itself: input {position} of class {label} is said to be classified "
                f"{'right' if outcome.passed else 'wrong'}, as class {outcome.prediction}. {_WAY_OUT}"
            )
    for side in job.sides:
        side.right.extend(position for position, outcome in found.items() if outcome.passed)
    return found


def certify(job: Job, side: Side, number: int, step: Step) -> int:
    """Look for the largest level that can be proved; return how many inputs there was no time for.

    A `fine` step halves the range: a certificate that fails at one level is not tried at larger ones. A costly one
    climbs over the reported levels, unless the largest level can often be proved; a complete one always looks there
    first. A certificate that samples settles all levels by one look at the largest, with one alpha.
    """
    search = Search(job, side, number, step, 1 if step.fine else side.finer)
    following: Next = halve if step.fine else climb
    if step.settles_all_levels or step.complete or (not step.fine and search.probe()):
        following = top_first(following)
    return search.run(following)


def attack(job: Job, side: Side, number: int, step: Step, *, test: bool, top: bool = False) -> int:
    """Look for the smallest level that breaks; return how many inputs there was no time for.

    The largest level comes first: what holds there need not be tried at smaller ones, and the way back from an example
    to its input often leads through several levels.

    Args:
        test: also attack the largest level that is proved.
        top: look at the largest level and at no other.
    """
    if top:
        search = Search(job, side, number, step, side.finer)
        search.top()
        return len(search.late)
    return Search(job, side, number, step, side.finer, test).run(top_first(halve))


def check_stored(step: Step, outcome: Outcome, side: Side, key: Key) -> None:
    """Refuse an outcome that does not fit the level it is stored at: no step writes such a one."""
    size, budget = outcome.size, side.sizes[key.level - 1]
    if step.stage == "certify" and not outcome.broke("certify"):
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
