"""SmoothGrad against the closed form of one neuron."""

import math

import torch
from torch import nn

import holdfast as hf


def test_smoothgrad_is_the_gradient_of_the_smoothed_neuron():
    """The closed form w Phi(w.x / (sigma |w|)) of one ReLU, and the bound on how fast it can change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False)).double().eval()
    model[2].weight.data = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    w = model[0].weight.detach()[0]
    x = torch.rand(6, 3, dtype=torch.float64)
    y = torch.ones(6, dtype=torch.long)
    previous = math.inf
    for sigma in (0.2, 0.5, 2.0):
        found = hf.explain(model, x, y, "smoothgrad", sigma=sigma, samples=800).attribution
        normal = torch.distributions.Normal(0.0, 1.0)
        wanted = w * normal.cdf(x @ w / (sigma * w.norm()))[:, None]
        assert float((found - wanted).norm(dim=1).max()) < 0.1 * float(w.norm())
        # Theorem: |A(x) - A(x')| <= |w| |x - x'| / (sigma sqrt(2 pi)), which falls as sigma grows.
        rate = float(w.norm()) / (sigma * math.sqrt(2 * math.pi))
        apart = torch.cdist(x, x) + torch.eye(6)
        assert bool((torch.cdist(wanted, wanted) <= rate * apart + 1e-12).all())
        assert rate < previous
        previous = rate
