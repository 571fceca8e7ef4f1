"""Robust errors of classifiers that interpolate draws of a Gaussian component."""

import numpy as np
import pytest

from holdfast.analyze.theory.gaussian_mixture import (
    Alignment,
    cost_of_hardness,
    interpolate,
    mixture_error,
    robust_error,
)
from holdfast.errors import InputError


def draw(seed, count=5, size=40):
    rng = np.random.default_rng(seed)
    eta = rng.standard_normal(size)
    return rng.standard_normal((count, size)), eta / np.linalg.norm(eta), rng.choice([-1.0, 1.0], count)


def test_the_robust_error_is_that_of_a_simulation():
    rng = np.random.default_rng(0)
    _, eta, _ = draw(0)
    w, r, eps, n = rng.standard_normal(40) + 3 * eta, 1.5, 0.3, 40_000
    y = rng.choice([-1.0, 1.0], n)
    x = y[:, None] * r * eta + rng.standard_normal((n, 40))
    wrong = y * (x @ w) - eps * np.linalg.norm(w) < 0
    truth = robust_error(w, eta, r, eps)
    assert wrong.mean() == pytest.approx(truth, abs=4 * np.sqrt(truth * (1 - truth) / n))


@pytest.mark.parametrize("r", [0.5, 1.0, 3.0])
def test_the_closed_form_is_the_alignment_of_the_interpolation(r):
    met = 0
    for seed in range(20):
        noise, eta, y = draw(seed)
        g = Alignment.of(noise, eta, y)
        if r > g.increasing_from:
            met += 1
            w = interpolate(r * np.outer(y, eta) + noise, y)
            assert g(r) == pytest.approx(w @ eta / np.linalg.norm(w), abs=1e-10)
    assert met > 5


def test_it_increases_from_the_point_that_is_named_and_not_before():
    seen = 0
    for seed in range(60):
        noise, eta, y = draw(seed)
        g = Alignment.of(noise, eta, y)
        start = max(g.increasing_from, 0)
        values = [g(start + step) for step in (1e-6, 0.5, 1.0, 5.0)]
        assert values == sorted(values)
        if g.increasing_from > 0.05:
            seen += 1
            below = [interpolate(r * np.outer(y, eta) + noise, y) for r in (0.0, 0.9 * g.increasing_from)]
            cosines = [w @ eta / np.linalg.norm(w) for w in below]
            assert max(cosines) < 1e-9  # there the root has the other sign
            with pytest.raises(InputError, match="r >"):
                g(0.5 * g.increasing_from)
    assert seen > 3


def test_hard_examples_cost_more_with_larger_budgets_while_all_arguments_are_positive():
    p, r = np.array([0.3, 0.7]), np.array([2.0, 4.0])
    gaps = [cost_of_hardness(p, r, 0.4, 0.6, eps) for eps in (0.0, 0.2, 0.4, 0.7)]
    assert gaps == sorted(gaps)
    assert gaps[0] > 0
    beyond = [mixture_error(p, r, 0.4, eps) - mixture_error(p, r, 0.6, eps) for eps in (2.0, 4.0)]
    assert beyond[1] < beyond[0]  # without the condition the statement fails
    with pytest.raises(InputError, match="r_i g - eps > 0"):
        cost_of_hardness(p, r, 0.4, 0.6, 2.0)


def test_conditions_are_checked():
    noise, eta, y = draw(0)
    with pytest.raises(InputError, match=r"\|eta\| = 1"):
        Alignment.of(noise, 2 * eta, y)
    with pytest.raises(InputError, match="more inputs than examples"):
        interpolate(noise.T, np.ones(40))
    with pytest.raises(InputError, match="sum to 1"):
        mixture_error(np.array([0.5, 0.6]), np.ones(2), 0.5, 0.1)
