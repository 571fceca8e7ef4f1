"""Adversarial gradients jump by up to 2 eps L, and need not vanish at the end of training."""

import numpy as np
import pytest
from scipy.special import expit

from holdfast.analyze.theory.scattered_gradients import (
    gradient_change,
    gradient_tail,
    gradient_tail_as_printed,
    logistic_constants,
    sketch,
    sketch_slopes,
    tail_scale,
)
from holdfast.errors import InputError


def adversarial_gradient(theta, x, y, eps):
    moved = x - eps * y[:, None] * theta / np.linalg.norm(theta)
    return -(y * expit(-y * (moved @ theta))) @ moved / len(x)


def test_gradients_of_logistic_regression_change_as_bounded_and_really_jump():
    rng = np.random.default_rng(0)
    x, y, eps = rng.standard_normal((20, 3)), rng.choice([-1.0, 1.0], 20), 0.5
    _, l_tt, l_tx = logistic_constants(x, 2.0, eps)
    for _ in range(200):
        a, b = rng.standard_normal((2, 3))
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b) * rng.uniform(0, 2)
        change = np.linalg.norm(adversarial_gradient(a, x, y, eps) - adversarial_gradient(b, x, y, eps))
        bound = gradient_change(l_tt, l_tx, float(np.linalg.norm(a - b)), eps)
        assert change <= bound
    tiny = 1e-9 * np.array([1.0, 0, 0])
    jump = np.linalg.norm(adversarial_gradient(tiny, x, y, eps) - adversarial_gradient(-tiny, x, y, eps))
    assert jump > l_tt * 2e-9 * 1e6  # no Lipschitz constant covers it
    assert jump <= gradient_change(l_tt, l_tx, 2e-9, eps)


def test_the_sketch_has_its_kink_at_zero_and_its_minimum_there_for_large_budgets():
    theta = np.linspace(-2, 2, 4001)
    for eps, at_zero in ((0.6, False), (1.2, True)):
        brute = np.max([np.logaddexp(0, theta * (1 + d)) for d in np.linspace(-eps, eps, 201)], axis=0)
        np.testing.assert_allclose(sketch(theta, eps), brute, atol=1e-12)
        assert (abs(theta[np.argmin(sketch(theta, eps))]) < 1e-9) == at_zero
        left, right = sketch_slopes(eps)
        h = 1e-7
        zero = float(sketch(np.array([0.0]), eps)[0])
        assert left == pytest.approx((zero - float(sketch(np.array([-h]), eps)[0])) / h, abs=1e-5)
        assert right == pytest.approx((float(sketch(np.array([h]), eps)[0]) - zero) / h, abs=1e-5)


def test_the_tail_is_the_one_that_follows_and_not_the_printed_one():
    """Two values of the gradient meet the inequality of the proof with equality: the corrected bound is attained."""
    for gamma in (5.0, 6.0, 10.0):
        p = gradient_tail(gamma)
        expected = p * (gamma**2 / 2 - 2 * gamma) + (1 - p) * (2**2 / 2 - 2 * 2)
        assert expected == pytest.approx(0, abs=1e-12)
        assert p > gradient_tail_as_printed(gamma)
    assert gradient_tail(3.0) == 1.0
    with pytest.raises(InputError, match="gamma > 2"):
        gradient_tail(2.0)


def test_late_gradients_of_sgd_stay_below_the_tail():
    rng, eps, theta, seen = np.random.default_rng(0), 1.2, 1.5, []
    for _ in range(4000):
        g = (1 + eps * np.sign(theta)) * expit(theta + eps * abs(theta))
        seen.append(abs(g))
        theta -= 0.02 * (g + rng.standard_normal())
    scale = tail_scale(eps, 1.5)
    late = np.array(seen[2000:])
    assert late.mean() > 0.1  # it does not vanish: the minimum is a kink
    for gamma in (4.5, 6.0):
        assert (late > gamma * scale).mean() <= gradient_tail(gamma)
    assert tail_scale(eps, 1.5, 0.2, 0.4) == pytest.approx(scale + 0.3)
