"""DDN: exact on linear models of two classes, exact counts."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.ddn import ddn, ddn_nearest
from holdfast.errors import InputError


def test_the_distance_of_a_linear_boundary():
    model = nn.Linear(9, 2).double().eval()
    model.bias.data = -0.5 * model.weight.data.sum(1)  # both classes meet in the middle of the range
    x = 0.4 + 0.2 * torch.rand(20, 9, dtype=torch.float64)
    y = model(x).argmax(1)
    logits, weight = model(x).detach(), model.weight.detach()
    truth = (logits[:, 0] - logits[:, 1]).abs() / (weight[0] - weight[1]).norm()
    near = truth < 0.3
    assert int(near.sum()) >= 3
    found = ddn_nearest(model, x, y, "l2", steps=200)
    assert bool((found.distance >= truth - 1e-9).all())
    assert torch.allclose(found.distance[near], truth[near], rtol=0.05)


def test_counts_are_exact_and_broken_inputs_leave():
    model, shape = tiny_nets()["cnn"]
    x = torch.rand(12, *shape)
    model[-1].bias.data -= model(x).detach().mean(0)  # all classes within reach
    y = model(x).argmax(1)
    found = ddn_nearest(model, x, y, "l2", steps=9)
    assert found.gradients.tolist() == [9] * 12
    assert found.queries.tolist() == [10] * 12
    result = ddn(model, x, y, hf.L2(3.0))
    assert bool(result.success.all())
    assert int(result.queries.max()) < 50


@pytest.mark.parametrize("options", [{"steps": 0}, {"epsilon": 0.0}, {"gamma": 0.0}])
def test_bad_options_are_refused(options):
    model, x, y = nn.Linear(4, 3).eval(), torch.rand(2, 4), torch.zeros(2, dtype=torch.long)
    with pytest.raises(InputError, match=f"'{next(iter(options))}' .*: expected"):
        hf.attack(model, x, y, hf.L2(0.1), "ddn", **options)
