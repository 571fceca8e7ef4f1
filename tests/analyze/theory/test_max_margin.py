"""Adversarial logistic regression ends at the direction of the largest margin."""

import numpy as np
import pytest
from scipy.optimize import minimize

from holdfast.analyze.theory.max_margin import adversarial_max_margin, descend, max_margin, step_limit
from holdfast.errors import InputError


def points(seed, count=5, size=8):
    return np.random.default_rng(seed).standard_normal((count, size)) + 0.5


def by_solver(x, eps):
    """The shortest w with w.x_i - eps |w| >= 1, by sequential quadratic programming."""
    limits = [{"type": "ineq", "fun": lambda w, r=row: w @ r - eps * np.linalg.norm(w) - 1} for row in x]
    start = 3 * max_margin(x)
    options = {"ftol": 1e-15, "maxiter": 1000}
    return minimize(lambda w: w @ w, start, constraints=limits, method="SLSQP", options=options).x


@pytest.mark.parametrize("seed", range(4))
def test_both_margins_equal_a_general_solver(seed):
    x = points(seed)
    eps = 0.4 / np.linalg.norm(max_margin(x))
    np.testing.assert_allclose(max_margin(x), by_solver(x, 0.0), atol=1e-6)
    np.testing.assert_allclose(adversarial_max_margin(x, eps), by_solver(x, eps), atol=1e-5)


def test_the_margins_obey_lemma_4_2():
    for seed in range(10):
        x, eps = points(seed), 0.1
        plain, attacked = (np.linalg.norm(w) for w in (max_margin(x), adversarial_max_margin(x, eps)))
        assert 1 / plain == pytest.approx(1 / attacked + eps, abs=1e-8)
        assert (x @ max_margin(x)).min() == pytest.approx(1, abs=1e-8)


def test_descent_turns_to_the_direction():
    x = points(1)
    limit = max_margin(x) / np.linalg.norm(max_margin(x))
    early, late = (np.linalg.norm(descend(x, 0.2, steps) - limit) for steps in (10, 5000))
    assert late < 1e-2 < early
    assert step_limit(x) == pytest.approx(2 / np.linalg.svd(x)[1][0] ** 2)


def test_data_that_are_not_separable_are_refused():
    with pytest.raises(InputError, match="hyperplane"):
        max_margin(np.array([[1.0], [-1.0]]))
    x = points(0)
    with pytest.raises(InputError, match="separable under the budget"):
        adversarial_max_margin(x, 1.01 / np.linalg.norm(max_margin(x)))
