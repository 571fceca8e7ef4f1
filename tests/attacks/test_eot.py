"""EOT: equal to PGD without randomness, the mean gradient with it, and the proxy gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks import eot
from holdfast.attacks.core.ascent import perturb
from holdfast.attacks.core.chance import mean_prediction, seeded
from holdfast.attacks.core.losses import cross_entropy, margin
from holdfast.attacks.eot import (
    Sampling,
    eot_fgsm,
    eot_pgd,
    expected_gradient,
    proxy_gradient,
)
from holdfast.attacks.fgsm import fgsm
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import get

THREATS = {"linf": hf.Linf(0.1), "l2": hf.L2(0.3), "l1": hf.L1(0.8)}


class NoisyLinear(nn.Module):
    """Linear model with Gaussian noise: on the weights, one draw for a batch, or on the logits, one for each input."""

    def __init__(self, inputs=6, classes=3, weights=0.0, logits=0.0):
        super().__init__()
        self.layer = nn.Linear(inputs, classes).double()
        self.weights, self.logits = weights, logits

    def forward(self, x):
        weight = self.layer.weight + self.weights * torch.randn_like(self.layer.weight)
        z = x @ weight.T + self.layer.bias
        return z + self.logits * torch.randn_like(z)


def task(count=20, **noise):
    model = NoisyLinear(**noise).eval()
    x = torch.rand(count, 6, dtype=torch.float64)
    return model, x, (x @ model.layer.weight.T + model.layer.bias).argmax(1)


@pytest.mark.parametrize("average", ["gradients", "outputs"])
@pytest.mark.parametrize("threat", list(THREATS))
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_without_randomness_it_is_pgd(name, threat, average):
    model, shape = tiny_nets()[name]
    model, x = model.double(), torch.rand(12, *shape, dtype=torch.float64)
    y, threat = model(x).argmax(1), THREATS[threat]
    step = {"steps": 6, "step_size": threat.budget / 4}
    last = perturb(model, x, y, threat, noise=Noise.for_batch(0, 12), random_start=False, **step)
    eot = eot_pgd(model, x, y, threat, samples=4, votes=3, average=average, **step)
    assert torch.allclose(eot.x_adv, last, atol=1e-9)
    assert torch.equal(eot.success, model(last).argmax(1) != y)
    more = eot_pgd(model, x, y, threat, samples=4, votes=3, average=average, restarts=3, **step)
    assert bool((more.success | ~eot.success).all())
    one = eot_fgsm(model, x, y, threat, samples=4)
    plain = fgsm(model, x, y, threat)
    assert torch.equal(one.success, plain.success)
    assert torch.allclose(one.x_adv[plain.success], plain.x_adv[plain.success], atol=1e-9)
    same = perturb(
        model,
        x,
        y,
        threat,
        noise=Noise.for_batch(0, 12),
        random_start=False,
        steps=1,
        step_size=threat.budget,
        sparsity=0,
    )
    assert torch.allclose(one.x_adv, same, atol=1e-9)


def test_outputs_average_is_the_gradient_of_the_loss_of_the_mean_softmax():
    """Against autograd through the mean of the softmaxes, on the same draws."""
    model, x, y = task(weights=3.0)
    with seeded(5, x.device):
        gradient, loss, log_p = expected_gradient(model, x, y, Sampling(7, "outputs"))
    leaf = x.clone().requires_grad_(True)
    with seeded(5, x.device):
        mean = torch.stack([model(leaf).softmax(1) for _ in range(7)]).mean(0)
    expected = -mean.gather(1, y[:, None])[:, 0].log()
    expected.sum().backward()
    assert torch.allclose(gradient, leaf.grad)
    assert torch.allclose(loss, expected.detach())
    assert torch.allclose(log_p, mean.log().detach())


def test_gradients_average_is_the_mean_of_the_gradients():
    model, x, y = task(weights=3.0)
    with seeded(5, x.device):
        gradient, loss, _ = expected_gradient(model, x, y, Sampling(7))
    leaf = x.clone().requires_grad_(True)
    with seeded(5, x.device):
        expected = torch.stack([cross_entropy(model(leaf), y) for _ in range(7)]).mean(0)
    expected.sum().backward()
    assert torch.allclose(gradient, leaf.grad)
    assert torch.allclose(loss, expected.detach())


def test_outputs_average_survives_losses_whose_exponential_is_zero():
    model, x, y = task(weights=1.0)
    model.layer.bias.data = torch.tensor([0.0, 2000.0, 2000.0], dtype=torch.float64)
    gradient, loss, _ = expected_gradient(model, x, torch.zeros_like(y), Sampling(5, "outputs"))
    assert bool((gradient.abs().sum(1) > 0).all())
    assert bool(torch.isfinite(gradient).all())
    assert bool((loss > 1000).all())


def linear_loss_gradient(model, x, y, samples, seed):
    """Mean gradient of z_1 - z_0 itself: two classes far apart make the cross-entropy linear in the logits."""
    with seeded(seed, x.device):
        gradient, _, _ = expected_gradient(model, x, y, Sampling(samples))
    return gradient


def test_symmetric_weight_noise_averages_to_the_mean_weights_with_error_one_over_root_n():
    model, x, _ = task(4, classes=2, weights=0.5)
    model.layer.bias.data = torch.tensor([-500.0, 500.0], dtype=torch.float64)
    y = torch.zeros(4, dtype=torch.long)
    exact = model.layer.weight.data[1] - model.layer.weight.data[0]

    def error(samples):
        trials = [linear_loss_gradient(model, x[:1], y[:1], samples, seed) - exact for seed in range(30)]
        return float(torch.stack(trials).square().mean().sqrt())

    # Each entry is a difference of two weights, with noise of standard deviation 0.5 sqrt(2).
    errors = {n: error(n) for n in (1, 4, 16)}
    for n, found in errors.items():
        assert found == pytest.approx(0.5 * math.sqrt(2 / n), rel=0.25)


def test_one_pass_draws_for_each_copy():
    model, x, y = task(3, classes=2, logits=1.0)
    with seeded(1, x.device):
        gradient, loss, log_p = expected_gradient(model, x, y, Sampling(5, one_pass=True))
    leaf = x.repeat(5, 1).requires_grad_(True)
    with seeded(1, x.device):
        z = model(leaf)
    values = cross_entropy(z, y.repeat(5))
    values.sum().backward()
    assert torch.allclose(gradient, leaf.grad.view(5, 3, -1).mean(0))
    assert torch.allclose(loss, values.detach().view(5, 3).mean(0))
    assert torch.allclose(log_p.exp(), z.softmax(1).view(5, 3, 2).mean(0).detach())


@pytest.mark.parametrize("attack", [eot_pgd, eot_fgsm])
@pytest.mark.parametrize("noise", [{"weights": 0.3}, {"logits": 0.3}])
def test_the_seed_decides_and_the_generator_is_left_alone(attack, noise):
    model, x, y = task(**noise)
    before = torch.get_rng_state()
    first = attack(model, x, y, hf.L2(0.2), noise=Noise.for_batch(1, 20), samples=3, votes=5)
    torch.manual_seed(99)
    again = attack(model, x, y, hf.L2(0.2), noise=Noise.for_batch(1, 20), samples=3, votes=5)
    other = attack(model, x, y, hf.L2(0.2), noise=Noise.for_batch(2, 20), samples=3, votes=5)
    torch.set_rng_state(before)
    attack(model, x, y, hf.L2(0.2), samples=3, votes=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.x_adv, again.x_adv)
    assert torch.equal(first.success, again.success)
    assert not torch.equal(first.x_adv, other.x_adv)


@pytest.mark.parametrize("threat", [hf.Linf(0.15), hf.L2(0.4), hf.L1(1.0), hf.Box(torch.full((6,), 0.15))])
def test_examples_are_in_the_set_and_hold_up_to_the_noise_of_the_vote(threat):
    """Weight noise s moves a difference of logits by s sqrt(2) |x| / sqrt(votes); four times that is the tolerance."""
    model, x, y = task(60, weights=0.3)
    result = eot_pgd(model, x, y, threat, samples=5, steps=10, momentum=0.5, restarts=2, votes=200)
    assert bool(threat.contains(result.x_adv, x).all())
    assert result.by == tuple("eot-pgd" if s else "" for s in result.success)
    excess = margin(mean_prediction(model, result.x_adv, 2000, seed=77), y)
    tolerance = 4 * 0.3 * math.sqrt(2 / 200) * result.x_adv.norm(dim=1)
    assert int(result.success.sum()) > 3
    assert bool((excess > -tolerance)[result.success].all())
    assert bool((excess < tolerance)[~result.success].all())


def test_it_beats_single_draws_on_a_noisy_model():
    """The mean gradient finds what the gradient of one draw does not."""
    model, x, y = task(200, weights=2.0)
    few = eot_pgd(model, x, y, hf.L2(0.25), samples=1, steps=5, votes=100)
    many = eot_pgd(model, x, y, hf.L2(0.25), samples=40, steps=5, votes=100)

    def accuracy(result):
        return float((mean_prediction(model, result.x_adv, 500, seed=3).argmax(1) == y).double().mean())

    assert accuracy(many) < accuracy(few)


def test_zero_budget_and_counts():
    model, x, y = task(5, weights=0.01)
    model.layer.bias.data[0] += 50
    y = torch.zeros(5, dtype=torch.long)
    result = eot_pgd(model, x, y, hf.Linf(0.0), samples=3, steps=4, restarts=2, votes=7)
    assert torch.equal(result.x_adv, x)
    assert not bool(result.success.any())
    assert result.gradients.tolist() == [2 * 3 * 4] * 5
    assert result.queries.tolist() == [2 * (3 * 4 + 7)] * 5
    result = eot_pgd(model, x, y + 1, hf.Linf(0.1), samples=3, steps=4, votes=7, restarts=2)
    assert result.by == ("eot-pgd",) * 5
    assert result.gradients.tolist() == [12] * 5
    assert result.queries.tolist() == [19] * 5


def test_registered_for_random_models():
    assert get("attack", "eot-pgd").stochastic
    assert get("attack", "eot-fgsm").stochastic
    assert not get("attack", "pgd").stochastic


def test_bad_options_are_refused():
    model, x, y = task(2)
    with pytest.raises(InputError, match="expected an integer >= 1, got 0"):
        hf.attack(model, x, y, hf.Linf(0.1), "eot-pgd", samples=0)
    with pytest.raises(InputError, match="Did you mean 'outputs'"):
        hf.attack(model, x, y, hf.Linf(0.1), "eot-fgsm", average="output")


@given(st.integers(0, 9999), st.floats(0.0, math.pi / 2), st.integers(2, 40))
def test_proxy_gradient_has_the_angle(seed, theta, size):
    noise = Noise.for_batch(seed, 5)
    g = noise.fork(7).normal((1, size), torch.float64) * 10.0 ** (seed % 7 - 3)
    proxy = proxy_gradient(g, theta, noise)
    dot = (proxy * g).flatten(1).sum(1) / g.flatten(1).norm(dim=1)
    assert torch.allclose(proxy.flatten(1).norm(dim=1), torch.ones(5, dtype=torch.float64), atol=1e-9)
    across = (proxy - dot.view(-1, 1, 1) * g / g.flatten(1).norm(dim=1).view(-1, 1, 1)).flatten(1).norm(dim=1)
    assert torch.allclose(torch.atan2(across, dot), torch.full((5,), theta, dtype=torch.float64), atol=1e-6)


def test_proxy_gradient_gains_the_cosine_of_a_quadratic_loss():
    """Delta(alpha) / alpha -> G . g, which is |G| cos(theta); its mean at 90 degrees is zero."""
    a = torch.rand(6, dtype=torch.float64)
    x = torch.rand(2000, 6, dtype=torch.float64)
    gradient, alpha = 2 * a * x, 1e-6

    def gain(theta):
        g = proxy_gradient(gradient, theta, Noise.for_batch(1, 2000))
        return ((a * (x + alpha * g).square()).sum(1) - (a * x.square()).sum(1)) / alpha

    for theta in (0.0, 0.5, 1.2):
        assert torch.allclose(gain(theta), gradient.norm(dim=1) * math.cos(theta), atol=1e-4)
    assert abs(float(gain(math.pi / 2).mean())) < 1e-4


def test_proxy_directions_are_uniform_around_the_gradient():
    g = torch.zeros(20000, 3)
    g[:, 0] = 2.0
    u = proxy_gradient(g, math.pi / 2, Noise.for_batch(0, 20000))
    assert torch.allclose(u.mean(0), torch.zeros(3), atol=0.02)
    assert torch.allclose(u.square().mean(0), torch.tensor([0.0, 0.5, 0.5]), atol=0.02)
    with pytest.raises(InputError, match="not all zero"):
        proxy_gradient(torch.zeros(2, 3), 0.1, Noise.for_batch(0, 2))


def test_momentum_is_the_sum_of_normalised_gradients():
    """Against a loop of its own, on a network that is curved enough for the order of the steps to matter."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double().eval()
    x = torch.rand(8, 6, dtype=torch.float64)
    y = model(x).argmax(1)
    point, velocity = x, torch.zeros_like(x)
    for _ in range(5):
        leaf = point.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(leaf), y, reduction="sum"), leaf)
        velocity = 0.6 * velocity + gradient / gradient.abs().mean(1, keepdim=True)
        point = point + 0.1 * velocity / velocity.norm(dim=1, keepdim=True)
        offset = point - x
        point = x + offset * (0.3 / offset.norm(dim=1, keepdim=True)).clamp(max=1)
        point = point.clamp(0, 1)
    found = eot_pgd(model, x, y, hf.L2(0.3), steps=5, step_size=0.1, momentum=0.6, samples=2, votes=1)
    plain = eot_pgd(model, x, y, hf.L2(0.3), steps=5, step_size=0.1, samples=2, votes=1)
    inside = ((point > 0) & (point < 1)).all(1)  # the projection on ball and range together is another one
    assert int(inside.sum()) >= 3
    assert torch.allclose(found.x_adv[inside], point[inside], atol=1e-9)
    assert not torch.allclose(plain.x_adv[inside], point[inside], atol=1e-3)


def test_steps_are_a_quarter_of_the_budget_and_later_restarts_start_elsewhere(monkeypatch):
    model, x, y = task(6, weights=0.01)
    model.layer.bias.data[0] += 50  # nothing breaks, so that every restart sees all inputs
    y, starts = torch.zeros_like(y), []

    def noted(model, x, y, threat, x_start, sampling, **options):
        starts.append((x_start, options["step_size"]))
        return ascend(model, x, y, threat, x_start, sampling, **options)

    ascend = eot._ascend
    monkeypatch.setattr(eot, "_ascend", noted)
    eot_pgd(model, x, y, hf.Linf(0.2), samples=1, steps=1, votes=1, restarts=3)
    assert [size for _, size in starts] == pytest.approx([0.05] * 3)
    assert torch.equal(starts[0][0], x)
    for start, _ in starts[1:]:
        assert bool(hf.Linf(0.2).contains(start, x).all())
        assert float((start - x).abs().max()) > 0.05
    assert not torch.equal(starts[1][0], starts[2][0])
