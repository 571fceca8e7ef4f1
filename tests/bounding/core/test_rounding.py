"""Error bounds of sums and norms, against rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch

from holdfast.bounding.core.rounding import below, gamma, norm_above, unit


@pytest.mark.parametrize("count", [10, 100, 5000])
def test_gamma_covers_a_sum_that_loses_every_term_but_the_first(count):
    """1 + u + u + ... in float64 from left to right: each sum is halfway between two numbers and rounds to 1."""
    u = unit(torch.float64)
    total = 1.0
    for _ in range(count):
        total += u
    assert total == 1.0
    exact = 1 + count * Fraction(u)
    lost = exact - Fraction(total)
    assert lost <= Fraction(gamma(count + 1, torch.float64)) * exact
    assert Fraction(gamma(count + 1, torch.float64)) * exact < 2 * lost


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-150, 1e-162, 1e-170, 1e-300])
@pytest.mark.parametrize("count", [1, 7, 400])
def test_a_norm_from_above_is_never_below_the_exact_one_even_where_squares_underflow(scale, count):
    torch.manual_seed(count)
    v = scale * torch.randn(30, count, dtype=torch.float64)
    slack = Fraction(math.sqrt((count + 8) * torch.finfo(v.dtype).tiny))  # all squares lost
    for row, found in zip(v.tolist(), map(Fraction, norm_above(v).tolist()), strict=True):
        exact_2 = sum(Fraction(value) ** 2 for value in row)
        assert found**2 >= exact_2
        assert max(found / (1 + Fraction(1, 10**6)) - slack, 0) ** 2 <= exact_2


def test_the_norm_of_zeros_is_zero():
    v = torch.zeros(3, 5)
    v[1, 2] = 1e-40
    assert (norm_above(v) > 0).tolist() == [False, True, False]


def test_a_bound_that_is_converted_never_rises_and_infinite_ones_stay():
    bounds = torch.cat([torch.randn(200, dtype=torch.float64), torch.tensor([torch.inf, -torch.inf, 0.0]).double()])
    found = below(bounds, torch.float32)
    assert found.dtype == torch.float32
    assert bool((found.double() <= bounds).all())
    assert found[-3:].tolist() == [torch.inf, -torch.inf, 0.0]
    assert torch.allclose(found[:200].double(), bounds[:200], rtol=1e-6)
