"""One threat of an audit under way: the levels of its budget, and what is proved and broken so far."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from holdfast.audits.rows import Outcome
from holdfast.audits.task import Stage
from holdfast.threats import L1, L2, Linf, Threat

_LAST_DIGITS = 1e-6  # of a size: below that, an example and a radius do not contradict each other


@dataclass(frozen=True, eq=False)
class Side:
    """State of one threat. Level 0 is the unchanged input, level i is `levels[i - 1]`.

    Attributes:
        number: of the bracket.
        levels: nested threats, growing; `sizes` are their budgets as numbers.
        finer: grid refinement. Every `finer`-th level is reported; certificates search all levels, attacks only the
            reported ones, since the sizes of examples are continuous anyway.
        right: positions that the model classifies right.
        proved: for each position, the largest radius proved and the certificate.
        broken: for each position, the smallest example found.
        skipped: what was not done, and why.
        tried: the certificates that were run.
    """

    number: int
    levels: tuple[Threat, ...]
    sizes: tuple[float, ...]
    finer: int = 1
    right: list[int] = field(default_factory=list)
    proved: dict[int, tuple[float, str]] = field(default_factory=dict)
    broken: dict[int, Outcome] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)

    @property
    def threat(self) -> Threat:
        """The largest one."""
        return self.levels[-1]

    def within(self, grid: tuple[float, ...], position: int) -> tuple[int, int]:
        """Largest proved and smallest broken level of a grid of sizes, counted from 1; 0 and len + 1 for none."""
        outcome = self.broken.get(position)
        broken = len(grid) if outcome is None else bisect_left(grid, outcome.size or 0.0)
        return bisect_right(grid, self.proved.get(position, (0.0, ""))[0]), broken + 1

    def note(self, stage: Stage, outcome: Outcome) -> None:
        """Take up what a step found out."""
        size, position = outcome.size or 0.0, outcome.position
        known = self.broken.get(position)
        if outcome.broke(stage):
            if known is None or size < (known.size or 0.0):
                self.broken[position] = outcome
        elif stage == "certify" and size > self.proved.get(position, (0.0, ""))[0]:
            self.proved[position] = (size, outcome.by)

    def contradicted(self, position: int) -> bool:
        """Whether an example lies where a proof says that there is none."""
        if position not in self.proved or position not in self.broken:
            return False
        radius, size = self.proved[position][0], self.broken[position].size or 0.0
        proved, broken = self.within(self.sizes, position)
        return broken <= proved or size < radius * (1 - _LAST_DIGITS)

    def so_far(self, inputs: int) -> dict[str, Any]:
        """Counts at the largest level, for whoever watches the run."""
        return {
            "threat": str(self.threat),
            "budget": self.sizes[-1],
            "inputs": inputs,
            "clean": len(self.right),
            "certified": sum(self.proved.get(position, (0.0, ""))[0] >= self.sizes[-1] for position in self.right),
            "attacked": sum(position not in self.broken for position in self.right),
        }


def make_side(number: int, threat: Threat, budgets: int, finer: int) -> Side:
    """A threat of which nothing is known yet: balls, whose radii are continuous, on the finer grid."""
    finer = finer if isinstance(threat, Linf | L2 | L1) else 1
    levels = tuple(threat.budgets(budgets * finer))
    return Side(number, levels, _sizes(levels), finer)


def _sizes(levels: tuple[Threat, ...]) -> tuple[float, ...]:
    """Budgets as growing numbers; where the threat measures in its own size (a Box), shares of the largest one."""
    sizes = tuple(level.budget for level in levels)
    if all(a < b for a, b in pairwise(sizes)):
        return sizes
    return tuple((i + 1) / len(levels) for i in range(len(levels)))
