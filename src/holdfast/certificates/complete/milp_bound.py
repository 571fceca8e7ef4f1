"""Lower bounds of a program's linear relaxation that hold whatever the solver does.

HiGHS, through scipy, drops matrix entries of at most 1e-9 and works to absolute tolerances, so its optimum proves
nothing. Here it only suggests multipliers. Weak duality turns any multipliers into a lower bound, and `proven` computes
that bound with all rounding accounted for.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse

from holdfast.bounding.core.rounding import gamma, underflow
from holdfast.certificates.complete.milp_model import Floats, Mask, Program
from holdfast.utils import clock


@dataclass(frozen=True, eq=False)
class Scaled:
    """A program as the solver gets it: columns v = floor + width * t with 0 <= t <= 1, rows with entries up to 1.

    The solver's tolerances are then relative to the bounds of the network. Entries that it drops, and rounding in the
    scaling itself, can only make its multipliers less useful.

    Attributes:
        task: the program itself.
        weight: absolute entries of the program, transposed: (columns, rows).
        width: (columns,).
        height: (rows,), the factor of each row; negative for "at least", which becomes "at most".
        equal: (rows,), True for equalities.
        equalities: scaled rows, (rows that are `equal`, columns).  inequalities: the other ones.
        rhs: (rows,), the right-hand sides, scaled.
    """

    task: Program
    weight: sparse.csr_array
    width: Floats
    height: Floats
    equal: Mask
    equalities: sparse.csr_array
    inequalities: sparse.csr_array
    rhs: Floats

    @property
    def usable(self) -> bool:
        """Whether the solver can be asked at all: nothing overflowed, and no column has crossed bounds."""
        entries = (self.equalities.data, self.inequalities.data, self.rhs, self.width)
        return all(np.isfinite(e).all() for e in entries) and bool((self.task.floor <= self.task.ceiling).all())


@dataclass(frozen=True, eq=False)
class Relaxed:
    """What is known about a part of the program.

    Attributes:
        bound: proven lower bound of the objective; plus infinity if the part is proven empty.
        point: the solver's minimiser.  multipliers: its multipliers of the rows. None if it found no optimum.
    """

    bound: float
    point: Floats | None = None
    multipliers: Floats | None = None


def scale(task: Program) -> Scaled:
    """Scales the columns to their own range, and then the rows to their largest entry."""
    with np.errstate(all="ignore"):
        width = task.ceiling - task.floor
        matrix = task.matrix @ sparse.diags_array(width)
        largest = abs(matrix).max(axis=1).toarray().ravel() if matrix.nnz else np.zeros(matrix.shape[0])
        at_most = np.isfinite(task.upper)
        height = np.where(at_most, 1.0, -1.0) / np.maximum(largest, np.finfo(np.float64).tiny)
        height[largest == 0] = 0.0
        rhs = (np.where(at_most, task.upper, task.lower) - task.matrix @ task.floor) * height
        matrix = sparse.csr_array(sparse.diags_array(height) @ matrix)
    weight, equal = sparse.csr_array(abs(task.matrix).T), task.lower == task.upper
    return Scaled(task, weight, width, height, equal, matrix[equal], matrix[~equal], rhs)


def relax(lp: Scaled, objective: Floats, floor: Floats, ceiling: Floats) -> Relaxed:
    """Bounds objective @ v over the part of the program in which `floor` and `ceiling` fix some binaries."""
    found = _ask(lp, objective, floor, ceiling)
    if found is not None:
        point, multipliers = found
        return Relaxed(proven(lp, objective, floor, ceiling, multipliers), point, multipliers)
    # The part may be empty. How close can the whole program, which is not, come to the choices that were made?
    distance = np.where(ceiling < lp.task.ceiling, 1.0, 0.0) - np.where(floor > lp.task.floor, 1.0, 0.0)
    found = _ask(lp, distance, lp.task.floor, lp.task.ceiling) if distance.any() else None
    # On the part itself the objective zero is zero. A positive lower bound of it leaves no point there.
    empty = found is not None and proven(lp, np.zeros_like(objective), floor, ceiling, found[1]) > 0
    return Relaxed(math.inf if empty else -math.inf)


def _ask(lp: Scaled, objective: Floats, floor: Floats, ceiling: Floats) -> tuple[Floats, Floats] | None:
    """The solver's point and multipliers in the units of the program; None if it does not claim an optimum."""
    cost = objective * lp.width
    size = float(np.abs(cost).max()) or 1.0
    width = np.where(lp.width > 0, lp.width, 1.0)
    from scipy import optimize  # half a second of imports, for no other method

    found = optimize.linprog(
        cost / size,
        A_ub=lp.inequalities,
        b_ub=lp.rhs[~lp.equal],
        A_eq=lp.equalities,
        b_eq=lp.rhs[lp.equal],
        bounds=np.stack([(floor - lp.task.floor) / width, (ceiling - lp.task.floor) / width], 1),
        options={"time_limit": max(clock.left(), 1e-3)},
    )
    if found.status != 0:
        return None
    multipliers = np.zeros(len(lp.rhs))
    multipliers[lp.equal], multipliers[~lp.equal] = found.eqlin.marginals, found.ineqlin.marginals
    with np.errstate(all="ignore"):
        return lp.task.floor + lp.width * found.x, multipliers * lp.height * size


def proven(lp: Scaled, objective: Floats, floor: Floats, ceiling: Floats, multipliers: Floats) -> float:
    """A lower bound of c v over floor <= v <= ceiling and the rows L <= A v <= U, from any multipliers y.

    With r = c - A' y, c v = y (A v) + r v. That is at least the sum over rows of min(y L, y U) plus the sum over
    columns of min(r floor, r ceiling). A multiplier whose sign needs a side that the row does not have counts as 0.
    The computed r is off by at most gamma (|c| + |A|' |y|), which costs at most that times the size of v.
    """
    task = lp.task
    y = np.nan_to_num(multipliers, nan=0.0, posinf=0.0, neginf=0.0)
    side = np.where(y > 0, task.lower, task.upper)
    y, side = np.where(np.isfinite(side), y, 0.0), np.where(np.isfinite(side), side, 0.0)
    with np.errstate(all="ignore"):
        r = objective - task.matrix.T @ y
        terms = int(np.diff(lp.weight.indptr).max(initial=0))
        error = gamma(terms, torch.float64) * (np.abs(objective) + lp.weight @ np.abs(y))
        error += underflow(terms, torch.float64)
        parts = np.concatenate([y * side, r * np.where(r > 0, floor, ceiling)])
        lost = error * np.maximum(np.abs(floor), np.abs(ceiling))
        slip = gamma(len(parts), torch.float64) * np.abs(parts).sum() + lost.sum()
        # Twice, for the rounding of `slip` and of the last difference.
        bound = float(parts.sum() - 2 * (slip + underflow(len(parts), torch.float64)))
    return bound if math.isfinite(bound) else -math.inf
