"""PGD along proxies of the gradient: the law of the cosine, and its limits."""

import math

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.analyze.proxy_gradient import proxy_study


def linear(inputs=40):
    """Two classes far apart: the loss is linear in the input, so that the law is exact."""
    torch.manual_seed(0)
    model = nn.Linear(inputs, 2).double().eval()
    model.bias.data = torch.tensor([-500.0, 500.0], dtype=torch.float64)
    return model, torch.rand(200, inputs, dtype=torch.float64) * 0.2 + 0.4, torch.zeros(200, dtype=torch.long)


def test_one_l2_step_raises_a_linear_loss_by_the_cosine():
    model, x, y = linear()
    found = proxy_study(model, x, y, hf.L2(0.1), steps=1, step_size=0.1, degrees=(0, 30, 60, 90))
    assert found.relative == pytest.approx([math.cos(math.radians(t)) for t in (0, 30, 60, 90)], abs=1e-6)
    assert float(found.rise[3].abs().max()) < 1e-6
    signs = proxy_study(model, x, y, hf.Linf(0.05), steps=1, step_size=0.05, degrees=(0, 60, 90))
    assert signs.relative[1] == pytest.approx(0.5, abs=0.25)
    assert abs(signs.relative[2]) < 0.1


def test_accuracy_rises_with_the_angle():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    x = torch.rand(60, 10)
    y = model(x).argmax(1)
    found = proxy_study(model, x, y, "l2:0.4", degrees=(0, 90), steps=5)
    assert found.accuracy[0] < found.accuracy[1]
    assert found.rise.shape == (2, 60)
    flat = nn.Linear(10, 3).eval()
    flat.weight.data.zero_()  # no gradient: nothing moves
    assert float(proxy_study(flat, x, 0 * y, "l2:0.4", degrees=(0,), steps=2).rise.abs().max()) == 0
    with pytest.raises(hf.InputError, match="between 0 and 90"):
        proxy_study(model, x, y, "l2:0.4", degrees=(100,))
    with pytest.raises(hf.InputError, match="l2 or an Linf ball"):
        proxy_study(model, x, y, "l1:0.4")
