"""The projection onto a hyperplane inside a box, against linear and quadratic programmes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize

from holdfast.attacks.core.hyperplane import move_to_hyperplane
from holdfast.attacks.core.minimum_norm import norm_of

NORMS = ("linf", "l2", "l1")


def planes(seed, count=6, size=7, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, size, dtype=dtype, generator=g)
    x[torch.rand(count, size, generator=g) < 0.3] = 0.0  # values at the end of the range
    w = torch.randn(count, size, dtype=dtype, generator=g)
    w[torch.rand(count, size, generator=g) < 0.2] = 0.0
    inside = torch.rand(count, size, dtype=dtype, generator=g)
    return x, w, (w * inside).sum(1)  # each plane meets the box


def least_norm(x, w, b, norm):
    """By scipy: the least norm of d with <w, x + d> = b and 0 <= x + d <= 1."""
    n = len(x)
    if norm == "l2":
        start = np.clip(x + w * (b - w @ x) / (w @ w), 0, 1) - x
        found = minimize(
            lambda d: d @ d,
            start,
            jac=lambda d: 2 * d,
            bounds=list(zip(-x, 1 - x, strict=True)),
            constraints={"type": "eq", "fun": lambda d: w @ (x + d) - b, "jac": lambda d: w},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        return np.sqrt(found.fun)
    eye = np.eye(n)
    extra = np.ones((n, 1)) if norm == "linf" else eye  # |d_i| <= t, or |d_i| <= t_i
    above = np.block([[eye, -extra], [-eye, -extra]])
    cost = np.concatenate([np.zeros(n), np.ones(extra.shape[1])])
    bounds = [*zip(-x, 1 - x, strict=True), *[(0, None)] * extra.shape[1]]
    equal = np.concatenate([w, np.zeros(extra.shape[1])])[None]
    return linprog(cost, above, np.zeros(2 * n), equal, [b - w @ x], bounds).fun


@pytest.mark.parametrize("norm", NORMS)
@given(seed=st.integers(0, 10_000))
def test_the_least_move_onto_the_plane(norm, seed):
    x, w, b = planes(seed)
    d = move_to_hyperplane(x, w, b, norm)
    assert torch.allclose((w * (x + d)).sum(1), b, atol=1e-9)
    assert bool(((x + d >= -1e-12) & (x + d <= 1 + 1e-12)).all())
    for i in range(len(x)):
        least = least_norm(x[i].numpy(), w[i].numpy(), float(b[i]), norm)
        assert norm_of(d, norm)[i].item() == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("above", [True, False])
def test_a_plane_out_of_reach_gives_the_nearest_corner(norm, above):
    x, w, _ = planes(3)
    sign = 1.0 if above else -1.0
    b = sign * (w.abs().sum(1) + 1)
    d = move_to_hyperplane(x, w, b, norm)
    corner = torch.where(w == 0, x, (sign * w > 0).double())
    assert torch.allclose(x + d, corner)


@pytest.mark.parametrize("norm", NORMS)
def test_several_points_for_each_plane_and_another_range(norm):
    x, w, b = planes(5, count=4, size=20)
    other = 1 - x
    both = move_to_hyperplane(torch.stack([x, other]), w, b, norm)
    assert torch.allclose(both[0], move_to_hyperplane(x, w, b, norm))
    assert torch.allclose(both[1], move_to_hyperplane(other, w, b, norm))
    # the map p = 4 x - 2 of the range to [-2, 2] scales every move by four
    moved = move_to_hyperplane(4 * x - 2, w, 4 * b - 2 * w.sum(1), norm, -2.0, 2.0)
    assert torch.allclose(moved, 4 * both[0])


@pytest.mark.parametrize("norm", NORMS)
def test_degenerate_planes_give_finite_moves(norm):
    x = torch.rand(3, 5)
    w = torch.randn(3, 5)
    w[0] = 0
    w[1] *= 1e-30
    b = torch.tensor([0.0, 1.0, float((w[2] * x[2]).sum())])
    d = move_to_hyperplane(x, w, b, norm)
    assert bool(torch.isfinite(d).all())
    assert torch.equal(d[0], torch.zeros(5))
    assert bool(d[2].abs().max() < 1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_single_precision_stays_close_in_many_dimensions(norm):
    x, w, b = planes(8, count=16, size=3000, dtype=torch.float64)
    exact = move_to_hyperplane(x, w, b, norm)
    rough = move_to_hyperplane(x.float(), w.float(), b.float(), norm)
    assert torch.allclose(norm_of(rough, norm).double(), norm_of(exact, norm), rtol=1e-3)
