"""Boundary-based saliency against autodiff at the boundary."""

import torch
from torch import nn

import holdfast as hf
from explain_tasks import QUICK_SEARCH


def test_boundary_saliency_is_the_gradient_at_the_boundary_and_not_at_the_input():
    model = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 3)).double().eval()
    model[0].weight.data *= 6
    x = torch.rand(5, 6, dtype=torch.float64)
    y = model(x).argmax(1)
    found = hf.explain(model, x, y, "bsm", search=QUICK_SEARCH)
    near, here = (p.clone().requires_grad_(True) for p in (found.boundary, x))
    at_boundary, at_x = (torch.autograd.grad(model(p).gather(1, y[:, None]).sum(), p)[0] for p in (near, here))
    torch.testing.assert_close(found.attribution, at_boundary)
    apart = (at_boundary - at_x).norm(dim=1) > 0.1 * at_x.norm(dim=1)
    assert int((apart & found.ok).sum()) >= 3
