"""Quadrature rules and the completeness error, by hand."""

import pytest
import torch

from holdfast.explanations.core.paths import completeness_error, nodes_and_weights


@pytest.mark.parametrize("rule", ["left", "right", "middle", "trapezoid", "gauss-legendre"])
def test_rules_add_up_to_one_and_are_exact_where_they_should_be(rule):
    t, w = nodes_and_weights(rule, 6)
    assert float(w.sum()) == pytest.approx(1)
    assert bool((t >= 0).all() & (t <= 1).all())
    exact = {"left": 0, "right": 0, "middle": 1, "trapezoid": 1, "gauss-legendre": 11}[rule]
    for power in range(exact + 1):
        assert float((w * t**power).sum()) == pytest.approx(1 / (power + 1), abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "places"), [("left", [0, 1, 2, 3]), ("middle", [0.5, 1.5, 2.5, 3.5]), ("right", [1, 2, 3, 4])]
)
def test_where_the_rules_of_equal_weights_look(rule, places):
    t, weights = nodes_and_weights(rule, 4)
    assert (4 * t).tolist() == places
    assert weights.tolist() == [0.25] * 4


def test_the_completeness_error_by_hand():
    """Sums 3, 3 and 5 for values that change by 4, -4 and 0 (of size 10, of which one thousandth counts)."""
    total, at_x, at_b = (torch.tensor(v, dtype=torch.float64) for v in ([3.0, 3, 5], [5.0, 1, 10], [1.0, 5, 10]))
    assert completeness_error(total, at_x, at_b).tolist() == pytest.approx([1 / 4, 7 / 4, 5 / 0.01])
