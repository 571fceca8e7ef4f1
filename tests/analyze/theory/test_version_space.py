"""Version spaces shrink with the budget, and from |x|_p on the constant classifier is optimal."""

import numpy as np
import pytest

from holdfast.analyze.theory.version_space import (
    adversarial_loss,
    differences,
    dual,
    in_version_space,
    stuck_budget,
    zero_is_best,
)
from holdfast.errors import InputError


def draws(count, classes=3, size=4):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.standard_normal((classes, size)), rng.standard_normal(size), int(rng.integers(classes))


def test_the_version_space_shrinks_and_keeps_the_loss_below_log_k():
    seen = 0
    for weights, x, y in draws(200):
        inside = [in_version_space(weights, x, y, eps) for eps in (0.0, 0.05, 0.1, 0.4)]
        assert inside == sorted(inside, reverse=True)
        if inside[2]:
            seen += 1
            assert adversarial_loss(weights, x, y, 0.1) <= np.log(3) + 1e-12
    assert seen > 10


def test_membership_is_what_the_corners_say():
    for weights, x, y in draws(200):
        corners = x + 0.1 * np.array(np.meshgrid(*[[-1, 1]] * 4)).reshape(4, -1).T
        truth = bool((differences(weights, y) @ corners.T <= 0).all())
        assert in_version_space(weights, x, y, 0.1) == truth


def test_the_closed_form_agrees_with_a_search_along_the_ray():
    """The loss is convex along the ray: 0 is its minimum where small steps to both sides do not lower it."""
    best = []
    for weights, x, y in draws(300):
        for eps in (0.1, 0.4, 0.8):
            both = [adversarial_loss(t * weights, x, y, eps) for t in (-1e-6, 1e-6)]
            found = min(both) >= np.log(3) - 1e-12
            best.append(found)
            assert zero_is_best(weights, x, y, eps) == found
    assert 0.1 < np.mean(best) < 0.9


@pytest.mark.parametrize("p", [1.0, 2.0, np.inf])
def test_from_the_norm_of_the_input_on_nothing_beats_the_constant_classifier(p):
    for weights, x, y in draws(50):
        assert zero_is_best(weights, x, y, stuck_budget(x, p) * (1 + 1e-9), p)
    below = [zero_is_best(weights, x, y, 0.99 * stuck_budget(x, p), p) for weights, x, y in draws(50, size=1)]
    assert not all(below)  # with one input every s is parallel to x: below the norm no weights are stuck


def test_too_many_inputs_for_corners_are_refused():
    with pytest.raises(InputError, match="at most 16 inputs"):
        adversarial_loss(np.zeros((2, 20)), np.zeros(20), 0, 0.1)
    assert dual(4.0) == pytest.approx(4 / 3)
