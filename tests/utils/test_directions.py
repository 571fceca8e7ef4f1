"""Directional statistics: golden values, identities, and Bessel functions against mpmath."""

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch

from holdfast.errors import InputError
from holdfast.utils.directions import (
    bessel_ratio,
    cosines,
    kappa_exact,
    kappa_from,
    log_normaliser,
    mean_resultant_length,
    r_dpp,
    r_kappa,
    r_max,
    r_mean,
    r_smoothmax,
    unit,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthogonal(n, p):
    return torch.eye(p, dtype=torch.float64)[:n]


def test_golden_values():
    v = orthogonal(3, 784)
    assert float(mean_resultant_length(v)) == pytest.approx(0.577350, abs=1e-6)
    assert float(r_kappa(v)) == pytest.approx(0.865657, abs=1e-6)
    assert float(r_kappa(v, "thesis")) == pytest.approx(0.865388, abs=1e-6)
    pair = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    assert float(r_dpp(pair)) == pytest.approx(0.446287, abs=1e-6)


def test_orthogonal_and_identical_directions():
    v, same = orthogonal(4, 9), unit(draw(1, 9)).expand(4, 9)
    assert float(r_mean(v)) == 0
    assert float(r_smoothmax(v)) == pytest.approx(math.log(12))
    assert float(r_dpp(v)) == pytest.approx(0, abs=1e-12)
    assert float(mean_resultant_length(v)) == pytest.approx(0.5)
    assert float(r_mean(same)) == pytest.approx(1)
    assert float(r_max(same)) == pytest.approx(1)
    assert float(r_smoothmax(same)) == pytest.approx(1 + math.log(12))
    assert float(mean_resultant_length(same)) == pytest.approx(1)
    assert float(r_dpp(same)) > 25  # infinite, but for rounding
    assert float(r_dpp(orthogonal(2, 3)[[0, 0]])) == math.inf
    assert math.isfinite(float(r_dpp(same, jitter=1e-6)))
    assert float(mean_resultant_length(torch.cat([v, -v]))) == pytest.approx(0, abs=1e-12)


def test_identities_of_random_directions():
    v = unit(draw(6, 5, 11))
    n = v.shape[1]
    rho = mean_resultant_length(v)
    assert torch.allclose(rho.square(), (1 + (n - 1) * r_mean(v)) / n, atol=1e-12)
    by_hand = [[float(a @ b) for b in v[0]] for a in v[0]]
    off = [by_hand[i][j] for i in range(n) for j in range(n) if i != j]
    assert float(r_mean(v)[0]) == pytest.approx(sum(off) / len(off))
    assert float(r_max(v)[0]) == pytest.approx(max(off))
    assert float(r_smoothmax(v)[0]) == pytest.approx(math.log(sum(map(math.exp, off))))
    assert bool((r_max(v) <= r_smoothmax(v)).all())
    assert bool((r_smoothmax(v) <= r_max(v) + math.log(n * (n - 1))).all())
    volume = torch.linalg.svdvals(v).prod(-1)
    assert torch.allclose(r_dpp(v), -2 * volume.log(), atol=1e-9)
    turned = v @ torch.linalg.qr(draw(11, 11, seed=1)).Q
    for measure in (r_mean, r_max, r_smoothmax, r_dpp, r_kappa):
        assert torch.allclose(measure(turned), measure(v), atol=1e-9)
    signs = torch.tensor([1.0, -1, 1, -1, 1], dtype=torch.float64)[:, None]
    assert torch.allclose(r_dpp(signs * v), r_dpp(v), atol=1e-9)
    assert not torch.allclose(r_mean(signs * v), r_mean(v), atol=1e-3)


def test_unit_takes_any_scale_and_zero():
    g = draw(3, 5)
    for scale in (1e-30, 1.0, 1e30):
        assert torch.allclose(unit((g * scale).float()), unit(g).float(), atol=1e-6)
    zero = torch.zeros(1, 5, requires_grad=True)
    unit(zero).sum().backward()
    assert float(unit(zero).detach().abs().sum()) == 0
    assert bool(zero.grad.isfinite().all())


def test_gradients_are_those_of_finite_differences():
    for measure in (r_mean, r_max, r_smoothmax, r_dpp, r_kappa, lambda v: r_dpp(v, 1e-3)):
        g = draw(3, 6, seed=3).requires_grad_(True)
        assert torch.autograd.gradcheck(lambda g: measure(unit(g)), g)


@pytest.mark.parametrize("p", [2, 3, 10, 784, 3072])
@pytest.mark.parametrize("relative", [1e-3, 0.1, 1.0, 30.0])
def test_ratio_and_normaliser_against_mpmath(p, relative):
    kappa = relative * p
    with mpmath.workdps(40):
        upper, lower = mpmath.besseli(mpmath.mpf(p) / 2, kappa), mpmath.besseli(mpmath.mpf(p) / 2 - 1, kappa)
        ratio = float(upper / lower)
        half = mpmath.mpf(p) / 2
        log_c = float((half - 1) * mpmath.log(kappa) - half * mpmath.log(2 * mpmath.pi) - mpmath.log(lower))
    assert bessel_ratio(kappa, p) == pytest.approx(ratio, rel=1e-10)
    assert log_normaliser(kappa, p) == pytest.approx(log_c, rel=1e-10)
    assert kappa_exact(ratio, p) == pytest.approx(kappa, rel=1e-5 if relative > 1 else 1e-8)


def test_ratio_rises_and_banerjee_is_nearer_than_the_printed_formula():
    values = [bessel_ratio(kappa, 784) for kappa in np.geomspace(1, 1e5, 40)]
    assert all(a < b for a, b in pairwise(values))
    rho = torch.tensor(0.5, dtype=torch.float64)
    exact = kappa_exact(0.5, 2)
    assert float(kappa_from(rho, 2)) / exact - 1 == pytest.approx(0.006, abs=2e-3)
    assert float(kappa_from(rho, 2, "thesis")) / exact - 1 == pytest.approx(-0.137, abs=2e-3)
    far = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert torch.allclose(kappa_from(far, 784), kappa_from(far, 784, "thesis"), rtol=1e-3)


def sample_von_mises_fisher(p, kappa, n, seed=0):
    """Wood's algorithm, around the first axis."""
    rng = np.random.default_rng(seed)
    b = (p - 1) / (2 * kappa + math.sqrt(4 * kappa**2 + (p - 1) ** 2))
    x0 = (1 - b) / (1 + b)
    c = kappa * x0 + (p - 1) * math.log(1 - x0**2)
    found = []
    while len(found) < n:
        z = rng.beta((p - 1) / 2, (p - 1) / 2)
        w = (1 - (1 + b) * z) / (1 - (1 - b) * z)
        if kappa * w + (p - 1) * math.log(1 - x0 * w) - c >= math.log(rng.uniform()):
            found.append(w)
    w, u = np.array(found)[:, None], rng.normal(size=(n, p - 1))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    return torch.tensor(np.hstack([w, np.sqrt(1 - w**2) * u]))


@pytest.mark.parametrize(("p", "kappa"), [(3, 5.0), (50, 40.0), (784, 500.0)])
def test_kappa_is_recovered_from_samples_within_three_percent(p, kappa):
    v = sample_von_mises_fisher(p, kappa, 4000)
    rho = mean_resultant_length(v)
    if p > 10:  # Banerjee's estimate is 5 % too high for p = 3
        assert float(kappa_from(rho, p)) == pytest.approx(kappa, rel=0.03)
    assert kappa_exact(float(rho), p) == pytest.approx(kappa, rel=0.03)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="at least 2"):
        r_mean(orthogonal(1, 3))
    with pytest.raises(InputError, match="4 directions in 3 dimensions"):
        r_dpp(unit(draw(4, 3)))
    with pytest.raises(InputError, match="at least 0 and below 1"):
        kappa_exact(1.0, 3)
    with pytest.raises(InputError, match="p >= 2"):
        bessel_ratio(1.0, 1)
    assert bessel_ratio(0.0, 5) == 0
    assert cosines(orthogonal(2, 2)).tolist() == [[1, 0], [0, 1]]


def test_directions_that_agree_or_cancel_have_finite_measures_and_gradients():
    for v in (orthogonal(2, 784)[[0, 0]], torch.cat([orthogonal(1, 784), -orthogonal(1, 784)])):
        v = v.clone().requires_grad_(True)
        for measure in (mean_resultant_length, r_kappa, lambda v: r_kappa(v, "thesis")):
            value = measure(v)
            (gradient,) = torch.autograd.grad(value, v)
            assert bool(value.isfinite())
            assert bool(gradient.isfinite().all())
    rho = torch.tensor([1e-3, 0.999], dtype=torch.float64)  # far beyond those of samples: still the formula itself
    assert kappa_from(rho, 784).tolist() == pytest.approx([r * (784 - r**2) / (1 - r**2) for r in rho.tolist()])


def test_opposite_directions_have_the_least_cosine_and_the_jitter_leaves_orthogonal_ones_alone():
    v = orthogonal(1, 5)
    assert float(r_max(torch.cat([v, -v]))) == -1
    assert float(r_dpp(orthogonal(3, 5), jitter=0.1)) == pytest.approx(0, abs=1e-12)
    pair = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    assert float(r_dpp(pair, jitter=0.1)) == pytest.approx(-math.log(1 - (0.6 / 1.1) ** 2))


@pytest.mark.parametrize("p", [2, 3, 10, 784])
def test_the_normaliser_is_continuous_at_zero(p):
    assert log_normaliser(0.0, p) == pytest.approx(log_normaliser(1e-6, p), abs=1e-6)
