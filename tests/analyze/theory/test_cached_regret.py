"""Regret of descent in the weights and ascent in cached perturbations, on a game with known constants."""

import numpy as np
import pytest

from holdfast.analyze.theory.cached_regret import Problem, adaptive_over_constant, regret_adaptive, regret_constant
from holdfast.errors import InputError

EPS = 0.5


def play(scale, steps, *, beta=None, seed=0):
    """Regret of SGD and block ascent on mean_i a_i (theta x_i - x_i^2 / 2), |theta| <= 1, |x_i| <= EPS.

    The second argument of a step is `eta / sqrt(v_i)` with the running maximum v_i, or one step for all inputs.
    """
    rng, n = np.random.default_rng(seed), len(scale)
    theta, x, v, top = 1.0, np.zeros(n), np.zeros(n), np.zeros(n)
    problem = constants(scale)
    lr = problem.weight_distance / (problem.weight_gradient * np.sqrt(steps))
    if beta is None:
        up = np.sqrt(n) * problem.input_distance / (np.sqrt((problem.gradients**2).sum()) * np.sqrt(steps))
    else:
        up = problem.input_distance * (1 - beta) ** 0.25 / np.sqrt(steps)
    losses, used = [], []
    for _ in range(steps):
        best = np.clip(theta, -EPS, EPS)
        losses.append((scale * (theta * best - best**2 / 2)).mean())
        used.append(((scale * x).mean(), (scale * x**2 / 2).mean()))
        i = rng.integers(n)
        g = scale[i] * (theta - x[i])
        if beta is not None:
            v[i] = beta * v[i] + (1 - beta) * g**2
            top[i] = max(top[i], v[i])
        x[i] = np.clip(x[i] + (up if beta is None else up / np.sqrt(top[i] + 1e-12)) * g, -EPS, EPS)
        theta = np.clip(theta - lr * scale[i] * x[i], -1, 1)
    linear, constant = np.sum(used, axis=0)
    return float(np.sum(losses) - (-abs(linear) - constant))  # the best fixed theta is at an end of [-1, 1]


def constants(scale):
    return Problem(
        gradients=scale * (1 + EPS),
        weight_gradient=float(np.sqrt((scale**2).mean()) * EPS),
        weight_distance=2.0,
        input_distance=2 * EPS,
        smoothness=float(scale.max()),
        inputs=1,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_measured_regret_is_below_both_bounds(seed):
    scale = np.random.default_rng(seed).pareto(2.0, 8) + 0.2
    for steps in (200, 2000):
        assert play(scale, steps, seed=seed) <= regret_constant(constants(scale), steps)
        assert play(scale, steps, beta=0.5, seed=seed) <= regret_adaptive(constants(scale), steps, 0.5)


def test_the_ratio_is_that_of_the_terms_that_grow():
    gradients, beta = np.array([1.0, 2.0, 10.0]), 0.5
    long, longer = 10**12, 4 * 10**12
    zero = Problem(gradients, 0.0, 0.0, 1.0, 1.0, 1)
    grown = regret_adaptive(zero, longer, beta) - regret_adaptive(zero, long, beta)
    base = regret_constant(zero, longer) - regret_constant(zero, long)
    assert adaptive_over_constant(gradients, beta) == pytest.approx(grown / base, rel=1e-9)
    assert adaptive_over_constant(np.ones(5), beta) == pytest.approx(0.5**-0.25)  # equal gradients: the most it can be
    assert adaptive_over_constant(np.array([1e-6, 1e-6, 1.0]), beta) < 1


def test_the_last_term_has_n_and_not_its_square():
    problem = Problem(np.zeros(4), 0.0, 0.0, 2.0, 3.0, 5)
    assert regret_adaptive(problem, 7, 0.75) == pytest.approx(5 * 3 * 4 / (2 * 4 * 0.5))
    assert regret_constant(problem, 7) == pytest.approx(5 * 3 * 4 / (2 * 4))
    with pytest.raises(InputError, match="beta < 1"):
        regret_adaptive(problem, 7, 1.0)
