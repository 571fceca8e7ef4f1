"""The gradient of a loss of linear bounds changes at most as Proposition 3.3.1 says."""

import numpy as np
import pytest

from holdfast.analyze.theory.bound_smoothness import gradient_change_of_bounds
from holdfast.errors import InputError


def upper(theta, a, x, eps):
    """g_m = a_m theta^2 entry by entry, so grad g_m = diag(2 a_m theta); the bound's gradient at its worst x'."""
    g = a * theta**2
    size = np.linalg.norm(g, axis=1, keepdims=True)
    worst = x + eps * np.divide(g, size, out=np.zeros_like(g), where=size > 0)
    return (g * worst).sum(1), 2 * a * theta * worst


def loss_gradient(theta, a, x, eps):
    s, gradients = upper(theta, a, x, eps)
    p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    return p @ gradients, gradients


def test_random_games_stay_below_the_bound():
    rng, tight = np.random.default_rng(0), []
    for _ in range(200):
        a, x, eps = rng.standard_normal((3, 4)), rng.standard_normal(4), 0.3
        one = rng.standard_normal(4)
        two = one + 0.1 * rng.standard_normal(4)
        slope = 2 * np.abs(a * one).max(1)
        change = 2 * np.abs(a * (two - one)).max(1)
        size, distance = np.linalg.norm(x) + eps, float(np.linalg.norm(two - one))
        path = [one + t * (two - one) for t in np.linspace(0, 1, 50)]
        steepest = max(np.linalg.norm(loss_gradient(p, a, x, eps)[1], axis=1).max() for p in path)
        moved = np.linalg.norm(loss_gradient(two, a, x, eps)[0] - loss_gradient(one, a, x, eps)[0])
        lipschitz = np.full(3, 1.05 * steepest**2)  # of the weights of the classes, times the slope of the bounds
        bound = gradient_change_of_bounds(eps, size, slope[None], change[None], lipschitz, distance)
        assert moved <= bound
        tight.append(moved / bound)
    assert max(tight) > 0.2


def test_the_size_is_that_of_the_whole_ball():
    """At x = 0 the size of x itself would say that nothing changes."""
    a, x, eps = np.ones((1, 1)), np.zeros(1), 0.5
    one, two = np.zeros(1), np.ones(1)
    moved = np.linalg.norm(upper(two, a, x, eps)[1] - upper(one, a, x, eps)[1])
    slope, change = np.zeros((1, 1)), np.full((1, 1), 2.0)
    assert moved == pytest.approx(gradient_change_of_bounds(eps, eps, slope, change, np.zeros(1), 1.0))
    assert moved > gradient_change_of_bounds(eps, 0.0, slope, change, np.zeros(1), 1.0)
    with pytest.raises(InputError, match="at least 0"):
        gradient_change_of_bounds(-1.0, 1.0, slope, change, np.zeros(1), 1.0)


def test_the_jump_at_a_kink_is_attained():
    """g = theta, x = 0: the bound eps |theta| has the slopes -eps and eps on both sides of 0."""
    eps = 0.5
    bound = gradient_change_of_bounds(eps, eps, np.ones((1, 1)), np.zeros((1, 1)), np.zeros(1), 1e-12)
    assert bound == pytest.approx(eps - (-eps))
