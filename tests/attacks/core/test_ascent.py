"""Gradient ascent: directions of steepest ascent, and all steps at once for training."""

import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.ascent import perturb, steepest
from holdfast.random import Noise


def linear(classes=2, size=9):
    model = nn.Linear(size, classes).double().eval()
    x = 0.3 + 0.4 * torch.rand(30, size, dtype=torch.float64)  # far from the ends of the range: no clipping
    return model, x, model(x).argmax(1).detach()


def test_perturb_takes_all_steps_and_returns_the_last_iterate():
    model, x, y = linear()
    noise = Noise.for_batch(0, len(x))
    with torch.enable_grad():
        last = perturb(model, x, y, hf.Linf(0.1), noise=noise, steps=30, step_size=0.02)
    assert not last.requires_grad
    gradient = model.weight.detach()[1 - y] - model.weight.detach()[y]
    assert torch.allclose(last, x + 0.1 * gradient.sign(), atol=1e-9)
    assert model.weight.grad is None
    assert model.weight.requires_grad


def test_directions_have_norm_one():
    x, g = torch.full((4, 3, 5), 0.5), torch.randn(4, 3, 5)
    for threat in (hf.Linf(1.0), hf.L2(1.0), hf.L1(1.0), hf.Box(torch.rand(3, 5) + 0.1)):
        direction = steepest(threat, g, x, 0.2)
        assert torch.allclose(threat.distance(x + direction, x), torch.ones(4), atol=1e-5)
        assert bool(((direction * g).flatten(1).sum(1) > 0).all())
    for g in (torch.zeros(1, 4), torch.ones(1, 4)):
        assert bool(torch.isfinite(steepest(hf.L2(1.0), g, g, 0.1)).all())
    # an L1 step does not waste itself on values that cannot move
    x = torch.tensor([[1.0, 0.5, 0.5]])
    assert torch.equal(steepest(hf.L1(1.0), torch.tensor([[5.0, 1.0, 0.1]]), x, 0.0), torch.tensor([[0.0, 1.0, 0.0]]))
