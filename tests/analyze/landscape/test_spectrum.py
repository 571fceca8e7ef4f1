"""Eigenvalues by products equal the eigenvalues of the Hessian itself."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import holdfast as hf
from holdfast.analyze.landscape.attacked import Adversary, mean_loss
from holdfast.analyze.landscape.spectrum import initial_loss, spectrum
from holdfast.errors import InputError, UnsupportedError


def small(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype).eval()
    return model, torch.rand(40, 1, 2, 3, dtype=dtype), torch.randint(3, (40,))


def dense(model, x, y):
    shapes = [(name, p.shape, p.numel()) for name, p in model.named_parameters()]

    def loss(flat):
        parts = flat.split([count for _, _, count in shapes])
        weights = {name: part.view(shape) for (name, shape, _), part in zip(shapes, parts, strict=True)}
        return nn.functional.cross_entropy(functional_call(model, weights, (x,)), y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.autograd.functional.hessian(loss, flat)


def test_the_top_pairs_are_those_of_the_dense_hessian():
    model, x, y = small()
    truth = torch.linalg.eigvalsh(dense(model, x, y))
    order = truth.abs().argsort(descending=True)[:5]
    counts = []
    found = spectrum(model, x, y, k=5, tolerance=1e-10, watch=counts.append)
    torch.testing.assert_close(found.values, truth[order], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(dense(model, x, y) @ found.vectors.T, found.vectors.T * found.values, rtol=0, atol=1e-7)
    assert found.loss == pytest.approx(mean_loss(model, x, y))
    assert counts == list(range(1, found.products + 1))


def test_convolutions_with_pooling_too():
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 4, 5, padding=2), nn.ReLU()
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)).double().eval()
    x, y = torch.rand(30, 1, 4, 8).double(), torch.randint(3, (30,))
    truth = torch.linalg.eigvalsh(dense(model, x, y))
    found = spectrum(model, x, y, k=4, tolerance=1e-6, chunk=16)
    torch.testing.assert_close(found.values.abs(), truth.abs().sort(descending=True).values[:4], rtol=1e-5, atol=0)


def test_negative_eigenvalues_keep_their_sign():
    """Far from a minimum some of the largest eigenvalues are negative."""
    model, x, _ = small(3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    wrong = (model(x).argmax(1) + 1) % 3
    truth = torch.linalg.eigvalsh(dense(model, x, wrong))
    found = spectrum(model, x, wrong, k=20, tolerance=1e-10)
    assert float(found.values.min()) < -1e-3
    torch.testing.assert_close(found.values.abs(), truth.abs().sort(descending=True).values[:20], rtol=1e-7, atol=1e-9)


def test_the_chunk_does_not_matter_and_the_model_is_left_as_it_is():
    model, x, y = small()
    before = copy.deepcopy(model.state_dict())
    one, two = (spectrum(model, x, y, k=3, chunk=chunk, tolerance=1e-10) for chunk in (7, 500))
    torch.testing.assert_close(one.values, two.values)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_with_few_parameters_is_solved_densely():
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 2).double().eval(), torch.rand(9, 2).double(), torch.randint(2, (9,))
    truth = torch.linalg.eigvalsh(dense(model, x, y)).flip(0)
    torch.testing.assert_close(spectrum(model, x, y, k=5).values, truth[:5], rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match="below the 6 parameters"):
        spectrum(model, x, y, k=6)


def test_normalisation_divides_by_the_loss_of_fresh_weights():
    model, x, y = small()
    adversary = Adversary(hf.Linf(0.1), steps=3)
    fresh = initial_loss(model, x, y, adversary)
    assert fresh == initial_loss(model, x, y, adversary)  # the seed decides
    assert 0.9 < fresh < 2.5
    assert fresh > initial_loss(model, x, y, Adversary(hf.Linf(0.0)))
    found = spectrum(model, x, y, k=2)
    torch.testing.assert_close(found.normalised(fresh), found.values / fresh)


def test_weights_that_cannot_be_drawn_again_are_named():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.scale * self.layer(x.flatten(1))

    _, x, y = small(dtype=torch.float32)
    with pytest.raises(InputError, match="no fresh weights for 'scale'"):
        initial_loss(Scaled(), x, y, Adversary(hf.Linf(0.1)))


def test_bad_adversaries_are_refused():
    with pytest.raises(UnsupportedError, match="linf"):
        Adversary(hf.Patch(2, 2))
    with pytest.raises(InputError, match="steps"):
        Adversary(hf.Linf(0.1), steps=0)
