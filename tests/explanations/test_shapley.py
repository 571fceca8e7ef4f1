"""Exact Shapley values against all orders written out, closed forms, and the axioms."""

import itertools

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.errors import InputError


class Game(nn.Module):
    """Logits (f, 0) for a function f of inputs (B, d)."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        f = self.function(x)
        return torch.stack([f, torch.zeros_like(f)], 1)


def by_orders(function, x, b):
    """The mean over all orders of what each feature adds."""
    total = torch.zeros_like(x)
    orders = list(itertools.permutations(range(x.shape[1])))
    for order in orders:
        point = b.clone()
        for j in order:
            before = function(point)
            point[:, j] = x[:, j]
            total[:, j] += function(point) - before
    return total / len(orders)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_all_orders(chunk):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double().eval()

    def function(x):
        return net(x)[:, 0].detach()

    x, b = torch.rand(4, 5).double(), torch.rand(5).double()
    found = hf.explain(Game(function).eval(), x, torch.zeros(4, dtype=torch.int64), "shapley", baseline=b, chunk=chunk)
    torch.testing.assert_close(found.attribution, by_orders(function, x, b.expand_as(x).clone()))
    assert float(found.error.max()) < 1e-9
    assert bool(found.ok.all())
    assert found.gradients.tolist() == [32] * 4


def test_closed_forms_and_axioms():
    x, y = torch.rand(3, 4).double(), torch.zeros(3, dtype=torch.int64)
    w = torch.tensor([1.0, -2.0, 0.5, 0.0]).double()
    linear = hf.explain(Game(lambda x: x @ w + 3).eval(), x, y, "shapley", baseline=torch.full((4,), 0.25).double())
    torch.testing.assert_close(linear.attribution, (x - 0.25) * w)
    product = hf.explain(Game(lambda x: x[:, 0] * x[:, 1] * x[:, 2]).eval(), x, y, "shapley").attribution
    share = x[:, :3].prod(1) / 3  # black baseline: symmetric, and nothing for the fourth
    torch.testing.assert_close(product, torch.stack([share, share, share, torch.zeros_like(share)], 1))


def test_squares_of_an_image_are_features():
    model, shape = tiny_nets()["cnn"]
    x, y = torch.rand(2, *shape), torch.tensor([0, 1])
    found = hf.explain(model, x, y, "shapley", cell=4)
    assert "4 features" in found.by[0]  # 7 x 5 in squares of 4
    assert float(found.error.max()) < 1e-3
    tile = found.attribution[:, :, :4, :4].flatten(1)
    assert torch.equal(tile, tile[:, :1].expand_as(tile))
    chosen = hf.explain(model, x, y, "shapley")
    assert "12 features" in chosen.by[0]  # squares of 2 would be 12
    with pytest.raises(InputError, match="shapley-sampling"):
        hf.explain(model, x, y, "shapley", cell=1)
    with pytest.raises(InputError, match="13 features"):
        hf.explain(nn.Linear(13, 2).eval(), torch.rand(2, 13), y, "shapley")
