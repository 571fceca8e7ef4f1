"""The smallest value of a linear function over a threat set, against rational arithmetic."""

from fractions import Fraction

import pytest
import torch

import holdfast as hf
from holdfast.bounding.core.region import minimum, region
from holdfast.bounding.linear.coefficients import Coefficients


def exact_dot(a, b):
    return sum(Fraction(u) * Fraction(v) for u, v in zip(a, b, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e-20, 1e-23, 1e-30])
def test_the_minimum_over_an_l2_ball_is_below_the_exact_one_even_where_squares_underflow(scale):
    """In float32 the square of 1e-23 is zero, and so is the norm of coefficients of that size."""
    torch.manual_seed(0)
    x, c, threat = 0.4 + 0.2 * torch.rand(6, 9), scale * torch.randn(6, 4, 9), hf.L2(0.1)
    found = minimum(region(threat, x, sound=True), Coefficients(c), sound=True)
    for i in range(6):
        for k in range(4):
            row = c[i, k].tolist()
            drop = exact_dot(row, x[i].tolist()) - Fraction(found[i, k].item())
            assert drop > 0
            assert drop**2 >= Fraction(threat.eps) ** 2 * exact_dot(row, row)
            box = threat.eps * c[i, k].double().abs().sum().item()
            assert float(drop) < 1.001 * box + 1e-35  # the ball's own minimum or that of the box around it
