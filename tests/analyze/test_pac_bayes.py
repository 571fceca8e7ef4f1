"""The objective on quadratic losses, where it is exact; bounds on synthetic data; real models against a Hessian."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.func import functional_call, grad, jacrev
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.analyze.pac_bayes import (
    gibbs,
    kl_gaussians,
    linear_bound,
    pac_bayes,
    pac_bayes_of,
    robust_gap,
    sqrt_bound,
)
from holdfast.attacks.pgd import perturb
from holdfast.errors import InputError
from holdfast.random import Noise

DIAGONAL = torch.tensor([0.5, 2.0, 7.0], dtype=torch.float64)
SETTING = {"beta": 3.0, "sigma0_sq": 0.4}


def test_golden_values():
    log = pac_bayes(0.3, 2.0, diagonal=DIAGONAL, mode="log", **SETTING)
    assert log.curvature_term == pytest.approx(0.655748, abs=1e-6)
    assert log.norm_term == pytest.approx(2 / 2.4)
    assert log.value == pytest.approx(0.3 + 2 / 2.4 + 0.655748, abs=1e-6)
    assert log.sigma2.tolist() == pytest.approx([1 / (2.5 + 3 * h) for h in (0.5, 2, 7)])
    first = pac_bayes(0.3, 2.0, diagonal=DIAGONAL, mode="first-order", **SETTING)
    assert first.curvature_term == pytest.approx(1.9)  # sigma_0^2 / 2 times the trace; printed once with 1 / beta
    one = pac_bayes(0.3, 2.0, diagonal=DIAGONAL, mode="spherical", **SETTING)
    assert one.curvature_term == pytest.approx(math.log(1 + 1.2 * 9.5 / 3) / 2)
    assert one.sigma2.item() == pytest.approx(1 / (2.5 + 3 * 9.5 / 3))


def test_bounds_by_hand():
    """KL 2, 100 examples, tau 0.05: log(1 / tau) = 2.995732, log(2 n / tau) = 8.294050."""
    assert linear_bound(0.1, 2.0, n=100, tau=0.05, beta=50.0) == pytest.approx(0.1 + 4.995732 / 50 + 50 / 800, abs=1e-6)
    assert sqrt_bound(0.1, 2.0, n=100, tau=0.05) == pytest.approx(0.1 + 4 * math.sqrt(0.10294050), abs=1e-6)
    # mean (1, 2), variances (0.5, 2), sigma_0^2 = 0.5: the ratios are 1 and 4.
    found = kl_gaussians(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 2.0]), sigma0_sq=0.5)
    assert float(found) == pytest.approx((0 + 3 - math.log(4) + 5 / 0.5) / 2, abs=1e-6)


def objective(theta, sigma2, diagonal, beta, sigma0_sq):
    """E_Q R + KL / beta for R(w) = w.diag(H) w / 2, whose expectation under Q is exact."""
    risk = (diagonal * (theta.square() + sigma2)).sum() / 2
    return risk + kl_gaussians(theta, sigma2, sigma0_sq=sigma0_sq) / beta


@given(
    diagonal=st.lists(st.floats(0, 20), min_size=1, max_size=5),
    beta=st.floats(0.1, 100),
    sigma0_sq=st.floats(0.01, 5),
    seed=st.integers(0, 1000),
)
def test_the_value_is_the_minimum_over_the_variances(diagonal, beta, sigma0_sq, seed):
    generator = torch.Generator().manual_seed(seed)
    h = torch.tensor(diagonal, dtype=torch.float64)
    theta = torch.randn(len(h), generator=generator, dtype=torch.float64)
    risk, norm_sq = float((h * theta.square()).sum() / 2), float(theta.square().sum())
    found = {
        mode: pac_bayes(risk, norm_sq, diagonal=h, mode=mode, beta=beta, sigma0_sq=sigma0_sq)
        for mode in ("log", "spherical", "first-order")
    }
    for mode in ("log", "spherical"):
        best = found[mode].sigma2.expand_as(h)
        assert found[mode].value == pytest.approx(objective(theta, best, h, beta, sigma0_sq).item(), rel=1e-9)
    best = found["log"].sigma2.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(theta, best, h, beta, sigma0_sq), best)
    assert slope.abs().max() <= 1e-9 * (1 + h.max())
    for _ in range(5):
        other = found["log"].sigma2 * torch.exp(torch.randn(len(h), generator=generator, dtype=torch.float64))
        assert objective(theta, other, h, beta, sigma0_sq) >= found["log"].value * (1 - 1e-12)
    assert found["log"].value <= found["spherical"].value * (1 + 1e-12)
    assert found["spherical"].value <= found["first-order"].value * (1 + 1e-12)


def test_monte_carlo_agrees_on_a_quadratic_risk():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    hessian, theta = root @ root.T, torch.randn(3, generator=generator, dtype=torch.float64)
    sigma2 = pac_bayes(0.0, 0.0, diagonal=hessian.diagonal(), **SETTING).sigma2
    w = theta + sigma2.sqrt() * torch.randn(200_000, 3, generator=generator, dtype=torch.float64)
    risks = ((w @ hessian) * w).sum(1) / 2
    second_order = theta @ hessian @ theta / 2 + (sigma2 * hessian.diagonal()).sum() / 2
    assert abs(risks.mean() - second_order) < 3 * risks.std() / math.sqrt(len(w))


def test_the_trace_alone_will_do_but_for_the_logarithm():
    known = {"trace": 9.5, "weights": 3, **SETTING}
    for mode in ("first-order", "spherical"):
        with_diagonal = pac_bayes(0.0, 0.0, diagonal=DIAGONAL, mode=mode, **SETTING)
        assert pac_bayes(0.0, 0.0, mode=mode, **known).value == pytest.approx(with_diagonal.value)
    with pytest.raises(InputError, match="needs the diagonal"):
        pac_bayes(0.0, 0.0, mode="log", **known)
    with pytest.raises(InputError, match="its trace and the number"):
        pac_bayes(0.0, 0.0, trace=1.0, mode="spherical", **SETTING)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match=r"entry -1; .* -0\.8333"):
        pac_bayes(0.0, 0.0, diagonal=-torch.ones(2), **SETTING)
    assert pac_bayes(0.0, 0.0, diagonal=-0.5 * torch.ones(2), **SETTING).curvature_term < 0
    with pytest.raises(InputError, match="beta and sigma0_sq"):
        pac_bayes(0.0, 0.0, diagonal=DIAGONAL, beta=0.0, sigma0_sq=1.0)
    with pytest.raises(InputError, match="mode must be"):
        pac_bayes(0.0, 0.0, diagonal=DIAGONAL, mode="linear", **SETTING)


def test_kl_of_gaussians():
    mean, variance = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.1
    q = MultivariateNormal(mean, torch.diag(variance))
    p = MultivariateNormal(torch.zeros_like(mean), 0.7 * torch.eye(4, dtype=torch.float64))
    assert kl_gaussians(mean, variance, sigma0_sq=0.7).item() == pytest.approx(kl_divergence(q, p).item())
    assert kl_gaussians(0 * mean, torch.tensor(0.7), sigma0_sq=0.7).item() == pytest.approx(0.0)


def test_the_square_root_bound():
    bounds = [sqrt_bound(0.1, kl, n=1000, tau=0.05) for kl in (0, 1, 10, 100)]
    assert all(a < b for a, b in pairwise(bounds))
    many = [sqrt_bound(0.1, 10.0, n=n, tau=0.05) for n in (10**3, 10**5, 10**7, 10**9)]
    assert all(a > b for a, b in pairwise(many))
    assert many[-1] < 0.101  # with the KL alone divided by n it would stay above 0.1 + 4 sqrt(log(2 n / tau)) > 10
    assert sqrt_bound(0.0, 2.0, n=100, tau=0.5) == pytest.approx(4 * math.sqrt((2 + math.log(400)) / 100))


def test_gibbs_minimises_the_linear_bound():
    generator = torch.Generator().manual_seed(0)
    risks = torch.rand(5, generator=generator, dtype=torch.float64)
    prior = torch.rand(5, generator=generator, dtype=torch.float64).softmax(0)

    def right_side(q):
        return float((q * risks).sum() + (q * (q / prior).log()).sum() / 4)

    posterior, value = gibbs(risks, prior, beta=4.0)
    assert right_side(posterior) == pytest.approx(value)
    assert value == pytest.approx(-math.log(float((prior * torch.exp(-4 * risks)).sum())) / 4)
    score = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([score], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        q = score.softmax(0)
        loss = (q * risks).sum() + (q * (q / prior).log()).sum() / 4
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(score.detach().softmax(0), posterior, atol=1e-4, rtol=0)
    others = torch.randn(1000, 5, generator=generator, dtype=torch.float64).softmax(1)
    assert min(map(right_side, others)) >= value


def test_both_bounds_hold_on_synthetic_data():
    """Five coins as hypotheses; the posterior is the Gibbs one of the data. Both must hold in 90 % of the trials."""
    generator = torch.Generator().manual_seed(0)
    true, prior = torch.tensor([0.1, 0.3, 0.5, 0.6, 0.9]), torch.full((5,), 0.2)
    n, tau, beta, trials = 50, 0.1, 20.0, 400
    linear = root = 0
    for seen in torch.rand(trials, n, 5, generator=generator).lt(true).float().mean(1):
        q, _ = gibbs(seen, prior, beta=beta)
        kl, risk = float((q * (q / prior).log()).sum()), float((q * seen).sum())
        truth = float((q * true).sum())
        linear += truth <= linear_bound(risk, kl, n=n, tau=tau, beta=beta)
        root += truth <= sqrt_bound(risk, kl, n=n, tau=tau)
    assert linear >= (1 - tau) * trials
    assert root >= (1 - tau) * trials
    assert linear_bound(0.2, 0.5, n=n, tau=tau, beta=beta) < sqrt_bound(0.2, 0.5, n=n, tau=tau)


def attacked(model, x, y, threat, steps):
    noise = Noise.for_batch(0, len(x))
    return perturb(model, x, y, threat, noise=noise, steps=steps, step_size=2.5 * threat.budget / steps)


def hessian_of(model, names, x, y):
    """Hessian of the mean cross-entropy in the named parameters, (N, N)."""
    given = {n: p.detach() for n, p in model.named_parameters()}
    flat = torch.cat([given[n].flatten() for n in names])

    def loss(flat):
        parts = flat.split([given[n].numel() for n in names])
        moved = {n: part.view_as(given[n]) for n, part in zip(names, parts, strict=True)}
        return cross_entropy(functional_call(model, given | moved, (x,)), y)

    return jacrev(grad(loss))(flat)


def small_model(activation):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), activation, nn.Linear(5, 3)).double().eval()


@pytest.mark.parametrize("network", ["top", "full"])
def test_a_real_model(network):
    model, threat = small_model(nn.ReLU()), hf.Linf(0.1)
    x, y = torch.rand(11, 3, dtype=torch.float64), torch.arange(11) % 3
    names = [n for n, _ in model.named_parameters() if network == "full" or n.startswith("2.")]
    x_adv = attacked(model, x, y, threat, 3)
    diagonal = hessian_of(model, names, x_adv, y).diagonal()
    norm_sq = sum(p.square().sum().item() for n, p in model.named_parameters() if n in names)
    for mode in ("log", "spherical", "first-order"):
        found = pac_bayes_of(model, x, y, threat, network=network, mode=mode, steps=3, batch_size=4)
        truth = pac_bayes(
            cross_entropy(model(x_adv), y).item(), norm_sq, diagonal=diagonal, mode=mode, beta=11.0, sigma0_sq=0.2
        )
        assert found.value == pytest.approx(truth.value, rel=1e-10)
        assert found.curvature_term == pytest.approx(truth.curvature_term, rel=1e-10)
        assert found.sigma2.sum().item() == pytest.approx(truth.sigma2.sum().item(), rel=1e-10)
    chosen = pac_bayes_of(model, x, y, threat, network=network, steps=3, beta=5.0, sigma0_sq=0.3)
    assert chosen.norm_term == pytest.approx(norm_sq / 3)
    assert chosen.curvature_term == pytest.approx(0.15 * diagonal.sum().item())


def test_a_model_without_closed_form():
    model, threat = small_model(nn.Tanh()), hf.L2(0.1)
    x, y = torch.rand(6, 3, dtype=torch.float64), torch.arange(6) % 3
    hessian = hessian_of(model, [n for n, _ in model.named_parameters()], attacked(model, x, y, threat, 2), y)
    found = pac_bayes_of(model, x, y, threat, network="full", steps=2, samples=200, sigma0_sq=2.0)
    error = (2 * (hessian.square().sum() - hessian.diagonal().square().sum()) / 200).sqrt()
    assert abs(found.curvature_term - hessian.trace()) < 3 * error
    assert found.sigma2.ndim == 0
    with pytest.raises(InputError, match="needs the diagonal"):
        pac_bayes_of(model, x, y, threat, network="full", mode="log", steps=2, samples=1)
    with pytest.raises(InputError, match="'top' or 'full'"):
        pac_bayes_of(model, x, y, threat, network="head")
    with pytest.raises(InputError, match="label 3 of input 5"):
        pac_bayes_of(model, x, y.index_fill(0, torch.tensor(5), 3), threat, batch_size=2)


def test_the_gap():
    """Class 1 where x > 0.5, at distances 0.05, 0.15, ... from that boundary; a fifth of the new labels is wrong."""
    model = nn.Linear(1, 2).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [10.0]]))
        model.bias.copy_(torch.tensor([0.0, -5.0]))
    x = torch.linspace(0.05, 0.95, 10, dtype=torch.float64)[:, None]
    y = (x[:, 0] > 0.5).long()
    new = torch.where(torch.arange(10) % 9 == 0, 1 - y, y)
    assert robust_gap(model, (x, new), (x, new), hf.Linf(0.1)).gap == 0
    plain = robust_gap(model, (x, y), (x, new), hf.Linf(0.0), batch_size=3)
    assert (plain.train, plain.test) == (1.0, 0.8)
    assert plain.gap == pytest.approx(0.2)
    robust = robust_gap(model, (x, y), (x, new), hf.Linf(0.2))
    assert (robust.train, robust.test) == (0.6, 0.4)
    with pytest.raises(InputError, match="steps"):
        robust_gap(model, (x, y), (x, y), hf.Linf(0.05), steps=0)
