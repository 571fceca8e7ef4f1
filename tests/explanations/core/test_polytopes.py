"""The pieces of piecewise linear networks: affine maps, breakpoints by hand, and path integrals without quadrature."""

import itertools

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.errors import UnsupportedError
from holdfast.explanations.core.polytopes import breakpoints, path_slope, piece_at
from holdfast.explanations.evaluate.trust import setting_for
from holdfast.models.layers import MinMax


def net(*sizes, activation=nn.ReLU):
    torch.manual_seed(0)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1]).double().eval()


@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "pooled"])
def test_the_network_is_affine_around_an_input(name):
    model, shape = tiny_nets()[name]
    model, x = model.double(), torch.rand(4, *shape).double()
    piece = piece_at(model, x)
    for z in (x, x + 1e-7 * torch.randn_like(x)):
        affine = (piece.weight * z[:, None]).flatten(2).sum(2) + piece.bias
        assert torch.allclose(affine, model(z), atol=1e-12)
    saliency = hf.explain(model, x, torch.tensor([0, 1, 2, 0]), "saliency").attribution
    assert torch.allclose(saliency, piece.weight[torch.arange(4), torch.tensor([0, 1, 2, 0])])


def test_breakpoints_by_hand():
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 2)).double().eval()
    model[0].weight.data, model[0].bias.data = (
        torch.tensor([[1.0], [1.0]]).double(),
        torch.tensor([-0.2, -0.6]).double(),
    )
    model[2].weight.data, model[2].bias.data = torch.tensor([[1.0, -2.0]]).double(), torch.tensor([-0.1]).double()
    # relu(x - 0.2) - 2 relu(x - 0.6) - 0.1 is zero at 0.3 and at 0.9.
    found = breakpoints(model, torch.tensor([0.0]).double(), torch.tensor([1.0]).double())
    assert torch.allclose(found, torch.tensor([0.2, 0.3, 0.6, 0.9]).double())


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, MinMax])
def test_integrated_gradients_are_a_sum_over_pieces(activation):
    model = net(5, 40, 20, 3, activation=activation)
    x, b = torch.rand(5).double(), torch.rand(5).double()
    setting = setting_for(x[None])
    assert len(breakpoints(model, b, x)) >= 2
    attribution = (x - b) * path_slope(model, b, x, 1, setting)
    change = model(x[None])[0, 1] - model(b[None])[0, 1]
    assert float(attribution.sum()) == pytest.approx(float(change.detach()), abs=1e-12)
    fine = hf.explain(
        model,
        x[None],
        torch.tensor([1]),
        "integrated-gradients",
        baseline=b,
        steps=20_000,
        max_steps=20_000,
        rule="middle",
        tolerance=None,
    )
    assert torch.allclose(fine.attribution[0], attribution, atol=1e-4)


def test_big_is_a_sum_over_pieces():
    model, x = net(4, 30, 10, 3), torch.rand(3, 4).double()
    y = model(x).argmax(1)
    found = hf.explain(model, x, y, "big", steps=4000, max_steps=4000, rule="middle", tolerance=None)
    for i in found.ok.nonzero()[:, 0].tolist():
        exact = (x[i] - found.boundary[i]) * path_slope(model, found.boundary[i], x[i], int(y[i]), setting_for(x[:1]))
        assert torch.allclose(found.attribution[i], exact, atol=1e-3 * float(exact.abs().max()))
    assert bool(found.ok.any())


def test_a_network_without_pieces_is_refused():
    with pytest.raises(UnsupportedError, match="ReLU"):
        breakpoints(net(2, 3, 2, activation=nn.Tanh), torch.zeros(2).double(), torch.ones(2).double())
