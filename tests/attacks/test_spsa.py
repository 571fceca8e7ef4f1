"""SPSA: its random signs, and its steps of Adam; what it shares with NES is tested in core/test_estimate.py."""

import math

import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.spsa import rademacher, spsa
from holdfast.random import Noise


def test_random_signs_are_fair_and_independent():
    v = rademacher(Noise.for_batch(1, 50), 40, torch.zeros(50, 2, 65, dtype=torch.float64))
    assert v.shape == (50, 40, 2, 65)
    assert v.unique().tolist() == [-1.0, 1.0]
    flat = v.view(2000, 130)
    correlation = flat.T @ flat / 2000 - torch.eye(130)
    assert float(flat.mean(0).abs().max()) < 5 / math.sqrt(2000)
    assert float(correlation.abs().max()) < 6 / math.sqrt(2000)


def test_in_one_dimension_the_steps_are_those_of_adam_on_the_margin():
    """There the estimate is exact for a quadratic: (f(x + d) - f(x - d)) / 2d = f'(x)."""

    class Parabola(nn.Module):
        def forward(self, x):
            return torch.stack([torch.full_like(x[:, 0], 20.0), 3 * x[:, 0].square() + x[:, 0]], 1)

    x = torch.tensor([[0.1], [0.7]], dtype=torch.float64)
    threat = hf.Linf(4.0, low=-9.0, high=9.0)
    result = spsa(Parabola().eval(), x, torch.tensor([0, 0]), threat, steps=8, samples=2, delta=0.01, step_size=0.1)
    moved = x.clone().requires_grad_(True)
    adam = torch.optim.Adam([moved], lr=0.1, maximize=True)
    for _ in range(8):
        moved.grad = 6 * moved.detach() + 1
        adam.step()
    assert not bool(result.success.any())
    assert torch.allclose(result.x_adv, moved.detach(), atol=1e-6)
