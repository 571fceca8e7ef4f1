"""lambda of the saliency of smoothed models: closed form, sampling, and that it is tight and never exceeded."""

import math

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import InputError
from holdfast.explanations.evaluate.smoothed_saliency import lambda_sigma, lambda_sigma_relu, smoothed_saliency


def test_the_closed_form_is_what_smoothgrad_samples():
    torch.manual_seed(0)
    w, b, v = torch.randn(6, 3).double(), 0.3 * torch.randn(6).double(), torch.randn(6).double()
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double().eval()
    model[0].weight.data, model[0].bias.data = w, b
    model[2].weight.data, model[2].bias.data = torch.stack([v, -v]), torch.zeros(2).double()
    x = torch.rand(2, 3).double()
    sampled = hf.explain(model, x, torch.zeros(2, dtype=torch.int64), "smoothgrad", sigma=0.4, samples=20_000)
    exact = smoothed_saliency(w, b, v, x, 0.4)
    assert torch.allclose(sampled.attribution, exact, atol=0.1)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
def test_no_pair_of_points_exceeds_lambda(sigma):
    torch.manual_seed(0)
    w, b, v = torch.randn(8, 4).double(), torch.randn(8).double(), torch.randn(8).double()
    x = torch.randn(4000, 4).double()
    other = x + torch.randn(4000, 4).double() * torch.logspace(-6, 1, 4000).double()[:, None]
    change = (smoothed_saliency(w, b, v, x, sigma) - smoothed_saliency(w, b, v, other, sigma)).norm(dim=1)
    rate = change / (x - other).norm(dim=1)
    tight = lambda_sigma_relu(w, sigma, v)
    assert float(rate.max()) <= tight
    constant = float(torch.linalg.matrix_norm(v[:, None] * w, 2)) * math.sqrt(8)  # at least that of v relu(w x)
    assert float(rate.max()) <= lambda_sigma(sigma, lipschitz=constant)


def test_one_neuron_reaches_its_lambda_and_noise_lowers_it():
    w = torch.tensor([[0.6, -0.8]]).double() * 3
    for sigma in (0.2, 1.0):
        x = torch.zeros(1, 2).double()
        step = 1e-5 * w / w.norm()
        rate = (
            smoothed_saliency(w, torch.zeros(1).double(), torch.ones(1).double(), x + step, sigma)
            - smoothed_saliency(w, torch.zeros(1).double(), torch.ones(1).double(), x, sigma)
        ).norm() / 1e-5
        by_hand = 3 / (sigma * math.sqrt(2 * math.pi))
        assert lambda_sigma_relu(w, sigma) == pytest.approx(by_hand)
        assert float(rate) == pytest.approx(by_hand, rel=1e-4)
        assert lambda_sigma(sigma, lipschitz=3.0) == pytest.approx(2 * by_hand)
    with pytest.raises(InputError, match="sigma > 0"):
        lambda_sigma(0.0, lipschitz=1.0)
