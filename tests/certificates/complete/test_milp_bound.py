"""Bounds by weak duality, against rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from scipy import sparse

from holdfast.certificates.complete.milp_bound import proven, scale
from holdfast.certificates.complete.milp_model import Program


def random_program(rng, scale_of_entries):
    """Forty columns and thirty rows: equalities, "at most" and "at least" in turn, half of the entries zero."""
    matrix = rng.normal(size=(30, 40)) * (rng.random((30, 40)) < 0.5) * scale_of_entries
    floor = rng.normal(size=40)
    lower = rng.normal(size=30) * scale_of_entries
    upper = lower.copy()
    upper[1::3], lower[2::3] = np.inf, -np.inf
    return Program(sparse.csr_array(matrix), lower, upper, floor, floor + rng.random(40), np.zeros(40, dtype=bool))


def exact_bound(task, objective, multipliers):
    """sum min(y L, y U) + sum min(r floor, r ceiling), r = c - A' y, in rational arithmetic."""
    sides = np.where(multipliers > 0, task.lower, task.upper)
    y = [Fraction(float(v)) if np.isfinite(s) else Fraction(0) for v, s in zip(multipliers, sides, strict=True)]
    total = sum(v * Fraction(float(s)) for v, s in zip(y, sides, strict=True) if v)
    for column, cost, low, high in zip(task.matrix.toarray().T, objective, task.floor, task.ceiling, strict=True):
        r = Fraction(float(cost)) - sum(Fraction(float(a)) * v for a, v in zip(column, y, strict=True) if a)
        total += min(r * Fraction(float(low)), r * Fraction(float(high)))
    return total


@pytest.mark.parametrize("size", [1.0, 1e-120, 1e-300])
def test_a_proven_bound_is_below_the_exact_one_for_any_multipliers(size):
    """Entries times multipliers of 1e-300 each are lost altogether: the bound has to pay for what underflows."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        task, objective = random_program(rng, size), rng.normal(size=40) * size
        multipliers = rng.normal(size=30) * (size if seed % 2 else 1.0)
        exact = exact_bound(task, objective, multipliers)
        found = proven(scale(task), objective, task.floor, task.ceiling, multipliers)
        assert Fraction(found) <= exact
        assert float(exact - Fraction(found)) < 1e-10 * size + 1e-300
