"""The Lipschitz constant that a fit under attack needs."""

import math

import numpy as np
import pytest

from holdfast.analyze.theory.fitting_needs_slope import excess, lipschitz_needed
from holdfast.errors import InputError

SIZES = {"examples": 100_000, "inputs": 100, "parameters": 1000}
REST = {"isoperimetry": 1.0, "diameter": 10.0, "sensitivity": 10.0, "delta": 0.1}


def test_the_formula_at_one_point():
    gamma = excess(1.0, 0.5, 0.25)
    assert gamma == 1.0
    rest = 0.05 - 2 * math.exp(-100_000 / 2048)
    truth = 1 / 128 * math.sqrt(1e7 / (1000 * math.log(400.0) - math.log(rest)))
    assert lipschitz_needed(gamma, **SIZES, **REST) == pytest.approx(truth, rel=1e-12)


def test_it_grows_with_difficulty_examples_and_inputs_and_falls_with_parameters():
    base = lipschitz_needed(0.5, **SIZES, **REST)
    assert lipschitz_needed(0.6, **SIZES, **REST) > base
    assert lipschitz_needed(0.5, **SIZES | {"examples": 200_000}, **REST) > base
    assert lipschitz_needed(0.5, **SIZES | {"inputs": 200}, **REST) > base
    assert lipschitz_needed(0.5, **SIZES | {"parameters": 2000}, **REST) < base


def test_a_function_that_interpolates_noise_is_steeper():
    rng = np.random.default_rng(0)
    n = 20_000
    x, y = np.sort(rng.standard_normal(n)), rng.choice([-1.0, 1.0], n)
    steepest = float(np.abs(np.diff(y) / np.diff(x)).max())
    sizes = {"examples": n, "inputs": 1, "parameters": n}
    assert lipschitz_needed(excess(1.0, 0.0, 0.0), **sizes, **REST) <= steepest


@pytest.mark.parametrize(
    ("gamma", "change", "message"),
    [
        (0.0, {}, "gamma > 0"),
        (0.5, {"examples": 100}, "more examples or a larger delta"),
        (0.5, {"diameter": 0.01, "sensitivity": 1.0}, "4 W J > gamma"),
    ],
)
def test_conditions_are_named(gamma, change, message):
    with pytest.raises(InputError, match=message):
        lipschitz_needed(gamma, **{**SIZES, **REST, **change})
