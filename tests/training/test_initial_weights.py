"""Fresh weights that keep the width of intervals."""

import math

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.training.initial_weights import ibp_weights


def test_ibp_weights_keep_the_width_of_intervals() -> None:
    torch.manual_seed(0)
    layers = [module for _ in range(5) for module in (nn.Linear(400, 400), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(400, 10))
    x, threat = torch.rand(4, 400), hf.Linf(0.05)

    def growth() -> float:
        result = hf.bounds(model.eval(), x, threat, "ibp")
        return float((result.upper - result.lower).detach().mean()) / 0.1

    before = growth()
    ibp_weights(model, seed=0)
    assert 0.2 < growth() < 5 < before
    std = float(model[0].weight.detach().std())
    assert std == pytest.approx(math.sqrt(2 * math.pi) / 400, rel=0.02)
    again = ibp_weights(nn.Sequential(nn.Linear(400, 400)), seed=0)
    assert torch.equal(again[0].weight, model[0].weight)
