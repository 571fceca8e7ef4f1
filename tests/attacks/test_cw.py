"""Carlini and Wagner: close to the closed form on linear models, Adam against the library's."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.cw import _adam, cw, cw_nearest
from holdfast.attacks.losses import margin
from holdfast.errors import InputError


def linear(size=6):
    model = nn.Linear(size, 2).double().eval()
    model.weight.data *= 4
    model.bias.data = -0.5 * model.weight.data.sum(1)  # all classes meet in the middle of the range
    x = 0.3 + 0.4 * torch.rand(8, size, dtype=torch.float64)
    return model, x, model(x).argmax(1).detach()


@pytest.mark.parametrize(("norm", "q"), [("l2", 2), ("linf", 1)])
def test_close_to_the_distance_of_a_linear_boundary(norm, q):
    model, x, y = linear()
    w = (model.weight[1] - model.weight[0]).detach()
    truth = -margin(model(x), y).detach() / torch.linalg.vector_norm(w, q)
    near = truth < 0.2
    assert int(near.sum()) >= 3
    found = cw_nearest(model, x, y, norm, lr=0.02)
    assert bool((found.distance >= truth - 1e-9).all())
    assert torch.allclose(found.distance[near], truth[near], rtol=0.1, atol=2e-3)


def test_adam_equals_the_one_of_the_library():
    u = torch.randn(3, 4, dtype=torch.float64)
    theirs = u.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([theirs], lr=0.1)
    m, v = torch.zeros_like(u), torch.zeros_like(u)
    for step in range(5):
        optimiser.zero_grad()
        theirs.square().sum().backward()
        optimiser.step()
        move, m, v = _adam(2 * u, m, v, step, 0.1)
        u = u + move
        assert torch.allclose(u, theirs.detach(), atol=1e-6)


def test_counts_are_exact():
    model, x, y = linear()
    for norm in ("l2", "linf"):
        found = cw_nearest(model, x, y, norm, steps=10, rounds=3)
        assert found.gradients.tolist() == [3 * 10] * 8
        assert found.queries.tolist() == [1 + 3 * 10] * 8


def test_values_at_the_ends_of_the_range_can_move():
    model = nn.Linear(3, 2).double().eval()
    model.weight.data = torch.tensor([[-4.0, 0.0, 0.0], [4.0, 0.0, 0.0]], dtype=torch.float64)
    model.bias.data = torch.tensor([2.0, -2.0], dtype=torch.float64)
    x = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    for norm in ("l2", "linf"):
        found = cw_nearest(model, x, torch.tensor([0]), norm)
        assert float(found.distance) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("options", [{"steps": 0}, {"rounds": 0}, {"lr": 0.0}, {"c": 0.0}, {"kappa": -1.0}])
def test_bad_options_are_refused(options):
    model, x, y = linear()
    with pytest.raises(InputError):
        cw(model, x, y, hf.L2(0.1), **options)
