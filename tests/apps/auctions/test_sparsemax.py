"""Sparsemax: the projection itself, its range over boxes, and the rounding."""

import pytest
import torch
from scipy import optimize

from holdfast.apps.auctions.sparsemax import sparsemax, sparsemax_bounds


def test_sparsemax_is_the_projection_onto_the_simplex():
    torch.manual_seed(0)
    for x in (2 * torch.randn(10, 4, dtype=torch.float64)).unbind():
        found = optimize.minimize(
            lambda z, x=x: ((z - x.numpy()) ** 2).sum(),
            torch.full((4,), 0.25).numpy(),
            bounds=[(0, 1)] * 4,
            constraints={"type": "eq", "fun": lambda z: z.sum() - 1},
            options={"ftol": 1e-14},
        )
        torch.testing.assert_close(sparsemax(x), torch.from_numpy(found.x), atol=1e-5, rtol=0)


def test_sparsemax_sums_to_one_ignores_shifts_and_rows_that_are_out_of_reach():
    x = torch.randn(50, 3, dtype=torch.float64)
    z = sparsemax(x)
    torch.testing.assert_close(z.sum(1), torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(sparsemax(x + 7), z)
    longer = torch.cat([x, torch.full((50, 1), -1e9, dtype=torch.float64)], 1)
    torch.testing.assert_close(sparsemax(longer)[:, :3], z)
    torch.testing.assert_close(sparsemax(x.T, 0), z.T)


def test_gradient_of_sparsemax():
    x = torch.tensor([0.3, 0.1, -2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sparsemax, (x,))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bounds_of_sparsemax_hold_and_are_reached(size):
    torch.manual_seed(size)
    low = torch.randn(30, size, dtype=torch.float64)
    high = low + torch.rand(30, size, dtype=torch.float64)
    below, above = sparsemax_bounds(low, high, torch.float64)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * size)
    points = torch.cat([corners, torch.rand(400, size, dtype=torch.float64)])
    z = sparsemax(low[:, None] + points * (high - low)[:, None])
    assert bool((z >= below[:, None]).all() and (z <= above[:, None]).all())
    torch.testing.assert_close(z.amax(1), above, atol=1e-12, rtol=0)
    torch.testing.assert_close(z.amin(1), below, atol=1e-12, rtol=0)


def test_bounds_hold_for_sparsemax_in_single_precision():
    torch.manual_seed(0)
    x = 300 * torch.randn(20_000, 4)
    below, above = sparsemax_bounds(x, x, torch.float32)
    z = sparsemax(x).double()
    assert bool((z >= below).all() and (z <= above).all())
