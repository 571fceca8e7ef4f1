"""Importance with level rho against its closed form, and what a similarity of features must keep."""

import pytest
import torch
from torch import nn

from holdfast.errors import InputError
from holdfast.explanations.evaluate.feature_alignment import (
    feature_alignment,
    importance,
    important_features,
    similarity,
)


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 3).double().eval()


def test_linear_models_have_a_closed_form():
    """x_j (w x + c) + w_j sigma^2."""
    model, x, y = linear(), torch.rand(5, 4).double(), torch.tensor([0, 1, 2, 0, 1])
    sigma = 0.7
    w, f = model.weight[y].detach(), model(x).detach().gather(1, y[:, None])
    wanted = x * f + w * sigma**2
    found = importance(model, x, y, sigma=sigma, samples=40_000, quantity="logit", chunk=100_000)
    # The product is a quadratic in e; its standard deviation is sigma |f + w x| and 2^(1/2) sigma^2 |w| together.
    error = 5 * (sigma**2 * (f + w * x) ** 2 + 2 * sigma**4 * w**2).sqrt() / 200
    assert bool(((found - wanted).abs() < error).all())
    assert bool(((found - x * f).abs() > error).any())  # the second term counts


def test_no_noise_and_the_default_quantity():
    model, x, y = linear(), torch.rand(3, 4).double(), torch.tensor([0, 1, 2])
    p = model(x).softmax(1).gather(1, y[:, None]).detach()
    assert torch.allclose(importance(model, x, y, sigma=0.0, samples=1), x * p)
    images = nn.Sequential(nn.Flatten(), model).eval()
    square = importance(images, x.view(3, 1, 2, 2), y, sigma=0.2, samples=7, seed=3)
    assert torch.allclose(square.flatten(1), importance(model, x, y, sigma=0.2, samples=7, seed=3, chunk=5))
    with pytest.raises(InputError, match="sigma >= 0"):
        importance(model, x, y, sigma=-1.0)


def test_features_at_a_level():
    x = torch.tensor([[0.5, 0.2, 0.9]])
    level = torch.tensor([[0.3, -0.1, 0.0]])
    assert important_features(x, level).tolist() == [[0.5, 0.0, pytest.approx(0.9)]]
    assert important_features(x, level, rho=0.1).tolist() == [[0.5, 0.0, 0.0]]
    assert torch.equal(important_features(x, torch.tensor([[False, True, False]])), torch.tensor([[0, 0.2, 0]]))


@pytest.mark.parametrize("kind", ["f1", "cosine", "jaccard"])
def test_similarities(kind):
    torch.manual_seed(0)
    a, b = torch.rand(50, 1, 3, 3) * (torch.rand(50, 1, 3, 3) > 0.4), torch.rand(50, 1, 3, 3)
    b = b * (torch.rand(50, 1, 3, 3) > 0.4)
    assert torch.equal(similarity(a, a, kind), torch.ones(50))
    found = similarity(a, b, kind)
    assert 0 <= float(found.min()) < float(found.max()) <= 1
    assert torch.allclose(found, similarity(b, a, kind))
    zero = torch.zeros(1, 4)
    assert similarity(zero, zero, kind).tolist() == [1.0]
    assert similarity(zero, torch.ones(1, 4), kind).tolist() == [0.0]
    assert similarity(torch.tensor([[1.0, 0]]), torch.tensor([[0, 1.0]]), kind).tolist() == [0.0]


def test_similarities_by_hand_and_alignment():
    a, b = torch.tensor([[1.0, 3.0, 0.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    assert float(similarity(a, b, "f1")) == pytest.approx(2 * 0.25 * 0.5 / 0.75)
    assert float(similarity(a, b, "jaccard")) == pytest.approx(1 / 5)
    assert float(similarity(a, b, "cosine")) == pytest.approx(1 / (10**0.5 * 2**0.5))
    both = feature_alignment(torch.cat([a, b]), torch.cat([b, b]), at_least=0.6)
    assert both.mean.mean == pytest.approx((1 / 3 + 1) / 2)
    assert both.aligned
    assert not feature_alignment(torch.cat([a, b]), torch.cat([b, b]), at_least=0.7).aligned


def test_a_model_that_uses_the_same_pixels_is_aligned_and_one_that_uses_others_is_not():
    x = 0.5 + 0.5 * torch.rand(20, 6)
    people = important_features(x, torch.tensor([True, True, False, False, False, False]).expand(20, 6))
    for used, aligned in (([0, 1], True), ([4, 5], False)):
        model = nn.Linear(6, 2, bias=False).eval()
        model.weight.data.zero_()
        model.weight.data[0, used] = 5.0
        y = torch.zeros(20, dtype=torch.int64)
        # Centred by the value at x, so that only what a pixel changes is left; the draws are the same.
        moved, still = (importance(model, x, y, sigma=s, samples=200, quantity="logit") for s in (1.0, 0.0))
        found = feature_alignment(important_features(x, moved - still, rho=2.0), people)
        assert found.aligned == aligned
