"""From and / or of linear conditions on inputs X and outputs Y to the cases of a property."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from holdfast.errors import InputError, UnsupportedError
from holdfast.properties.property import Case, Polytope, Property

MOST_CASES = 100_000
"""Conjunctions that a property may have after its conditions have been multiplied out."""

Variable = tuple[str, int]
"""("X", 3): input number 3; ("Y", 0): output number 0."""


@dataclass(frozen=True)
class Atom:
    """sum of coefficient * variable <= limit; `where` says where it was read."""

    terms: tuple[tuple[Variable, float], ...]
    limit: float
    where: str = ""


@dataclass(frozen=True)
class And:
    """All of the parts."""

    parts: tuple["Formula", ...]


@dataclass(frozen=True)
class Or:
    """At least one of the parts."""

    parts: tuple["Formula", ...]


Formula = Atom | And | Or
Conjunction = tuple[Atom, ...]


def alternatives(formula: Formula) -> list[Conjunction]:
    """The formula as conjunctions of which one must hold (disjunctive normal form)."""
    if isinstance(formula, Atom):
        return [(formula,)]
    if isinstance(formula, Or):
        return list(itertools.chain.from_iterable(alternatives(part) for part in formula.parts))
    # What holds in every case is put together once: a file may list thousands of such conditions.
    parts = [alternatives(part) for part in formula.parts]
    found = [tuple(itertools.chain.from_iterable(part[0] for part in parts if len(part) == 1))]
    for part in (part for part in parts if len(part) != 1):
        if len(found) * len(part) > MOST_CASES:
            raise UnsupportedError(
                f"the property has more than {MOST_CASES:,} cases once its conditions are multiplied out"
            )
        found = [before + after for before in found for after in part]
    return found


@dataclass
class Ends:
    """Bounds of inputs read so far, by number."""

    lower: dict[int, float] = field(default_factory=dict)
    upper: dict[int, float] = field(default_factory=dict)

    def tighten(self, index: int, lower: float | None, upper: float | None) -> None:
        """Note bounds of one input; the tightest ones count."""
        if lower is not None:
            self.lower[index] = max(lower, self.lower.get(index, lower))
        if upper is not None:
            self.upper[index] = min(upper, self.upper.get(index, upper))

    def note(self, atom: Atom) -> None:
        """Note a condition on one input."""
        ((_, index), factor), bound = atom.terms[0], 0.0
        if len(atom.terms) > 1:
            raise UnsupportedError(f"{atom.where}: a condition on several inputs at once; a region must be a box")
        bound = atom.limit / factor
        self.tighten(index, bound if factor < 0 else None, bound if factor > 0 else None)


def to_property(formulas: Iterable[Formula], ends: Ends, inputs: int, outputs: int, name: str) -> Property:
    """The property whose counter-examples meet all formulas and lie within the bounds `ends` of the inputs."""
    base_lower = torch.full((inputs,), -torch.inf, dtype=torch.float64)
    base_upper = torch.full((inputs,), torch.inf, dtype=torch.float64)
    for values, tensor in ((ends.lower, base_lower), (ends.upper, base_upper)):
        if values:
            tensor[list(values)] = torch.tensor(list(values.values()), dtype=torch.float64)
    boxes: dict[tuple[tuple[tuple[int, float], ...], ...], list[Polytope]] = {}
    for conjunction in alternatives(And(tuple(formulas))):
        own, rows = Ends(), []
        for atom in conjunction:
            kinds = {kind for (kind, _), _ in atom.terms}
            if kinds == {"X"}:
                own.note(atom)
            elif kinds == {"Y"}:
                rows.append(atom)
            elif kinds:
                raise UnsupportedError(f"{atom.where}: a condition on inputs and outputs at once has no rule")
            elif atom.limit < 0:
                raise InputError(f"{atom.where}: a condition without variables that is never met")
        key = tuple(sorted(own.lower.items())), tuple(sorted(own.upper.items()))
        boxes.setdefault(key, []).append(_polytope(rows, outputs))
    cases = []
    for (lows, highs), unsafe in boxes.items():
        lower, upper = base_lower.clone(), base_upper.clone()
        for index, value in lows:
            lower[index] = max(value, float(lower[index]))
        for index, value in highs:
            upper[index] = min(value, float(upper[index]))
        cases.append(Case(lower, upper, tuple(unsafe)))
    return Property(tuple(cases), name)


def _polytope(atoms: list[Atom], outputs: int) -> Polytope:
    rows = torch.zeros(len(atoms), outputs, dtype=torch.float64)
    for row, atom in zip(rows, atoms, strict=True):
        for (_, index), factor in atom.terms:
            row[index] += factor
    return Polytope(rows, torch.tensor([atom.limit for atom in atoms], dtype=torch.float64))
