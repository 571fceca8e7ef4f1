"""The exact boundary against a grid."""

import torch
from torch import nn

from holdfast.explanations.core.exact_boundary import exact_boundary


def test_the_exact_boundary_is_no_farther_than_any_point_of_a_grid():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    model[0].weight.data *= 4
    side = torch.linspace(0, 1, 201, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    label = model(grid).argmax(1)
    x = torch.rand(6, 2, dtype=torch.float64)
    points, distance = exact_boundary(model, x)
    for one, own, far in zip(x, model(x).argmax(1), distance, strict=True):
        nearest = (
            (grid[label != own] - one).norm(dim=1).amin() if bool((label != own).any()) else torch.tensor(torch.inf)
        )
        assert float(far) <= float(nearest) + 1e-9
        assert float(nearest) <= float(far) + 0.01 or torch.isinf(nearest)
    found = torch.isfinite(distance)
    z = model(points[found]).topk(2, dim=1).values
    torch.testing.assert_close(z[:, 0], z[:, 1])
