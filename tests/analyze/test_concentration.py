"""Concentration of gradients over draws, Theorem 2.2.1 with its missing condition, fits, and planes."""

import math

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.analyze.concentration import concentration, draw_gradients, fit_von_mises_fisher, measure, plane_of
from holdfast.models import adv_bnn
from holdfast.utils.directions import bessel_ratio


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_gradients_of_equal_norm_meet_the_bound_exactly():
    g = normal(4, 10, 6)
    g = 3 * g / torch.linalg.vector_norm(g, dim=-1, keepdim=True)
    found = measure(g)
    assert torch.allclose(found.gain, found.bound, atol=1e-12)
    assert torch.allclose(found.correlation, torch.zeros(4, dtype=torch.float64), atol=1e-12)


def test_norms_that_do_not_depend_on_the_direction_meet_it_in_the_mean():
    v = normal(1, 800, 3) + torch.tensor([1.0, 0, 0])
    v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    found = measure(v * torch.rand(1, 800, 1, dtype=torch.float64))
    assert float(found.gain) == pytest.approx(float(found.bound), rel=0.06)


def test_the_counter_example_breaks_the_statement_without_its_condition():
    found = measure(torch.tensor([[[1.0, 0.0], [-2.0, 0.0]]], dtype=torch.float64))
    assert float(found.resultant) == pytest.approx(0, abs=1e-12)
    assert float(found.gain) == pytest.approx(0.5)
    assert float(found.bound) < 0.4
    assert float(found.correlation) == pytest.approx(0.5)


def test_gradients_of_a_model_are_those_of_its_draws():
    torch.manual_seed(0)
    model = adv_bnn(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()).eval()
    x, y = normal(3, 5).sigmoid(), torch.tensor([0, 1, 2])
    g = draw_gradients(model, x, y, draws=4, seed=2)
    assert g.shape == (3, 4, 5)
    assert torch.equal(g, draw_gradients(model, x, y, draws=4, seed=2))
    assert not torch.allclose(g[:, 0], g[:, 1])
    found = concentration(model, x, y, draws=4, seed=2)
    assert torch.allclose(found.r_mean, measure(g).r_mean)
    assert found.r_dpp is not None
    assert concentration(model, x, y, draws=7).r_dpp is None  # more draws than dimensions
    plain = concentration(model.sample(0), x, y, draws=3)
    assert torch.allclose(plain.resultant, torch.ones(3, dtype=torch.float64))
    with pytest.raises(hf.InputError, match="at least 2 draws"):
        draw_gradients(model, x, y, draws=1)
    with pytest.raises(hf.InputError, match="chunk must be at least 1"):
        concentration(model, x, y, draws=3, chunk=0)
    with pytest.raises(hf.InputError, match="input 0 holds NaN"):
        concentration(model, x * math.nan, y, draws=3)
    with pytest.raises(hf.InputError, match="empty batch"):
        concentration(model, x[:0], y[:0], draws=3)


def test_the_fit_has_the_largest_likelihood():
    p, kappa = 3, 4.0
    # By the inverse of the distribution function of mu.v in three dimensions.
    u = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = 1 + (u + (1 - u) * math.exp(-2 * kappa)).log() / kappa
    angle = 2 * math.pi * torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    s = (1 - w.square()).sqrt()
    v = torch.stack([w, s * angle.cos(), s * angle.sin()], 1)
    found = fit_von_mises_fisher(5 * v)
    assert found.kappa == pytest.approx(kappa, rel=0.03)
    assert float(found.mean[0]) == pytest.approx(1, abs=1e-3)
    rho = float(torch.linalg.vector_norm(v.mean(0)))
    assert bessel_ratio(found.kappa, p) == pytest.approx(rho, rel=1e-9)

    def likelihood(k):
        return math.log(k / (4 * math.pi * math.sinh(k))) + k * rho

    assert found.log_likelihood == pytest.approx(likelihood(found.kappa), rel=1e-9)
    assert found.log_likelihood > max(likelihood(found.kappa * factor) for factor in (0.9, 1.1))
    with pytest.raises(hf.InputError, match="all directions are the same"):
        fit_von_mises_fisher(torch.ones(3, 4))
    with pytest.raises(hf.InputError, match="at least 2 directions"):
        fit_von_mises_fisher(torch.ones(1, 4))


def test_the_plane_is_orthonormal_and_holds_both_means():
    first, second = normal(2, 30)
    second = first + 1e-4 * second
    basis = plane_of(first, second)
    assert torch.allclose(basis @ basis.T, torch.eye(2, dtype=torch.float64), atol=1e-10)
    for vector in (first, second):
        assert torch.allclose((vector @ basis.T) @ basis, vector, atol=1e-9)
    with pytest.raises(hf.InputError, match="parallel"):
        plane_of(first, 2 * first)
