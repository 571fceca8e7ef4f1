"""Estimates by random projections: they converge to the exact bounds, belong to their seed, and are no proof."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import settle, tiny_nets
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.bounding.core.region import balls, region
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.projected import Estimate, cauchy, estimate
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.errors import UnsupportedError
from holdfast.random import Noise

THREATS = [hf.Linf(0.08), hf.L2(0.25)]


class Skip(nn.Module):
    """Two convolutions with an addition around the second, for images of 2 x 5 x 4."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.middle, self.last = nn.Linear(80, 12), nn.Linear(12, 3)

    def forward(self, x):
        h = torch.relu(self.first(x))
        h = torch.relu(h + self.second(h))
        return self.last(torch.relu(self.middle(h.flatten(1))))


def nets():
    torch.manual_seed(4)
    conv = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, padding=1),
        nn.BatchNorm2d(6),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Linear(120, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    )
    mlp = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())
    return {
        "mlp": (mlp.append(nn.Linear(12, 4)).eval(), (6,)),
        "conv": (settle(conv), (2, 7, 5)),
        "skip": (Skip().eval(), (2, 5, 4)),
    }


def exact(graph, r):
    return linear.relaxation(graph, r, slopes="parallel", hidden=True, sound=False)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10_000))
def test_the_median_of_cauchy_projections_is_the_l1_norm(seed):
    v = torch.randn(2, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    projected = (cauchy(Noise.for_batch(seed, 2), 40_000, v) * v[:, None]).sum(2)
    # The standard deviation of the median is pi / (2 sqrt(count)), 0.8 %.
    assert torch.allclose(projected.abs().median(1).values, v.abs().sum(1), rtol=0.04)


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", nets())
@torch.no_grad()
def test_hidden_bounds_and_margins_converge_to_the_exact_ones(name, threat):
    model, shape = nets()[name]
    x = torch.rand(4, *shape)
    y = model(x).argmax(1)
    # Without a valid range: the estimate does not use it on a ball.
    graph, r = trace(model, x), region(type(threat)(threat.eps, low=-9.0, high=9.0), x, sound=False)
    truth = exact(graph, r)
    hidden = linear.hidden_layers(graph)[1:]
    open_neurons = sum(int(linear.open_neurons(truth, i).sum()) for i in hidden)
    assert open_neurons > 10, "some neurons are unstable"
    errors = []
    for count in (40, 4000):
        e = estimate(graph, r, noise=Noise.for_batch(0, 4), projections=count)
        gaps = [
            (a - b).abs().mean() / (truth.intervals[i][1] - truth.intervals[i][0]).mean()
            for i in hidden
            for a, b in zip(e.unproven.intervals[i], truth.intervals[i], strict=True)
        ]
        errors.append(max(float(gap) for gap in gaps))
    assert errors[1] < 0.4 * errors[0]
    assert errors[1] < 0.02
    margins = linear.margin_bounds(truth, y)
    assert float((e.margins(y) - margins).abs().mean()) < 0.02 * float(margins.abs().mean())


@pytest.mark.parametrize("threat", THREATS, ids=str)
@torch.no_grad()
def test_the_first_layer_is_exact_whatever_the_noise(threat):
    model, shape = nets()["conv"]
    x = torch.rand(3, *shape)
    graph, r = trace(model, x), region(threat, x, sound=False)
    first = linear.hidden_layers(graph)[0]  # batch norm, behind the first convolution
    truth = exact(graph, r).intervals[first]
    e = estimate(graph, r, noise=Noise.for_batch(0, 3), projections=1)
    for ours, theirs in zip(e.unproven.intervals[first], truth, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@torch.no_grad()
def test_estimates_stay_within_the_intervals_and_leave_stable_neurons_alone():
    model, shape = nets()["mlp"]
    x = torch.rand(20, *shape)
    graph, r = trace(model, x), region(hf.Linf(0.03), x, sound=False)
    e = estimate(graph, r, noise=Noise.for_batch(0, 20), projections=1).unproven
    plain = linear.relaxation(graph, r, slopes=None, hidden=False, sound=False).intervals
    second = linear.hidden_layers(graph)[1]
    (low, high), (wide_low, wide_high) = e.intervals[second], plain[second]
    assert bool((low >= wide_low).all())
    assert bool((high <= wide_high).all())
    assert bool((low <= high).all())  # although few rays may put an estimate beside the box
    stable = (wide_low >= 0) | (wide_high <= 0)
    assert 0 < int(stable.sum()) < stable.numel()
    assert torch.equal(low[stable], wide_low[stable])
    assert bool((low > wide_low)[~stable].any())


def test_each_input_of_balls_has_its_own_radius():
    model, shape = nets()["mlp"]
    x, y = torch.rand(3, *shape), torch.tensor([0, 1, 2])
    graph, noise = trace(model, x), Noise.for_batch(0, 3)
    eps = torch.tensor([0.05, 0.1, 0.2])
    for threat in (hf.Linf(1.0), hf.L2(1.0)):
        together = estimate(graph, balls(threat, x, eps, sound=False), noise=noise).margins(y)
        for i in range(3):
            alone = region(type(threat)(float(eps[i])), x[i : i + 1], sound=False)
            one = estimate(graph, alone, noise=noise[i : i + 1]).margins(y[i : i + 1])
            assert torch.allclose(together[i], one[0], atol=1e-5)


@pytest.mark.parametrize("threat", THREATS, ids=str)
@torch.no_grad()
def test_an_estimate_belongs_to_its_input_and_its_seed(threat):
    model, shape = nets()["conv"]
    x, y = torch.rand(4, *shape), torch.tensor([0, 1, 2, 0])
    graph = trace(model, x)

    def margins(part, seed=0, noise=None):
        noise = Noise.for_batch(seed, 4)[part] if noise is None else noise
        return estimate(graph, region(threat, x[part], sound=False), noise=noise, projections=9).margins(y[part])

    everything, one = slice(0, 4), slice(2, 3)
    assert torch.equal(margins(everything), margins(everything))
    assert torch.allclose(margins(everything)[one], margins(one), atol=1e-5)
    assert not torch.allclose(margins(everything), margins(everything, seed=1), atol=1e-4)
    shared = margins(everything, noise=Noise.for_batch(0, 1))
    assert torch.allclose(shared[0], margins(everything)[0], atol=1e-5)  # the rays of input 0 for all
    assert torch.allclose(shared[one], margins(one, noise=Noise.for_batch(0, 1)), atol=1e-5)


def test_the_same_noise_shows_one_smooth_loss_at_many_weights():
    """Finite differences agree with the gradient: the estimate is a function of the weights alone."""
    model = nets()["mlp"][0].double()
    x, y = torch.rand(3, 6, dtype=torch.float64), torch.tensor([0, 1, 2])
    weight = model[2].weight

    def loss():
        e = estimate(trace(model, x), region(hf.Linf(0.1), x, sound=False), noise=Noise.for_batch(5, 3), projections=7)
        return cross_entropy(-e.margins(y), y)

    (gradient,) = torch.autograd.grad(loss(), [weight])
    assert float(gradient.abs().max()) > 1e-3
    for i, j in ((0, 0), (3, 7), (11, 2), (15, 15)):
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[i, j] += step
                values.append(loss().item())
                weight[i, j] -= step
        assert math.isclose((values[0] - values[1]) / 2e-6, float(gradient[i, j]), rel_tol=1e-4, abs_tol=1e-7)


@pytest.mark.parametrize(("size", "threat"), [(0, THREATS[0]), *((n, t) for n in (1, 5) for t in THREATS)])
def test_any_batch_gives_finite_gradients(size, threat):
    model, shape = nets()["conv"]
    model.train(size != 0)  # batch norm takes its statistics from the batch, if there is one
    x, y = torch.rand(size, *shape), torch.arange(size) % 3
    graph, _ = trace_batch(model, x)
    margins = estimate(graph, region(threat, x, sound=False), noise=Noise.for_batch(0, size), projections=3).margins(y)
    assert margins.shape == (size, 3)
    assert bool((margins.gather(1, y[:, None]) == 0).all())
    gradients = torch.autograd.grad(margins.sum(), list(model.parameters()))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    assert size == 0 or any(g.abs().max().item() > 0 for g in gradients)


def test_networks_without_hidden_layers_need_no_estimate():
    model, shape = tiny_nets()["linear"]
    x, y = torch.rand(2, *shape), torch.tensor([0, 3])
    graph, r = trace(model, x), region(hf.Linf(0.1), x, sound=False)
    ours = estimate(graph, r, noise=Noise.for_batch(0, 2)).margins(y)
    assert torch.allclose(ours, linear.margin_bounds(exact(graph, r), y), atol=1e-6)


@torch.no_grad()
def test_an_estimate_can_be_too_tight_and_is_not_taken_for_a_bound():
    """Why it is for training alone: the lower bound of a neuron comes out above the exact one."""
    model, shape = nets()["mlp"]
    x = torch.rand(1, *shape)
    graph, r = trace(model, x), region(hf.Linf(0.1), x, sound=False)
    second = linear.hidden_layers(graph)[1]
    low = exact(graph, r).intervals[second][0]
    estimates = [estimate(graph, r, noise=Noise.for_batch(s, 1), projections=1).unproven for s in range(5)]
    assert any(bool((e.intervals[second][0] > low + 1e-3).any()) for e in estimates)
    assert not issubclass(Estimate, Relaxation)
    names = {m.name for kind in ("bounds", "certify") for m in hf.methods(kind)}
    assert not {name for name in names if "project" in name or "estimat" in name}


def test_what_projections_do_not_cover_is_refused_by_name():
    noise = Noise.for_batch(0, 1)
    pooled, shape = tiny_nets()["pooled"]
    x = torch.rand(1, *shape)
    with pytest.raises(UnsupportedError, match=r"layer '.*MaxPool.*without projections"):
        estimate(trace(pooled, x), region(hf.Linf(0.1), x, sound=False), noise=noise)
    model, shape = nets()["mlp"]
    x = torch.rand(1, *shape)
    with pytest.raises(UnsupportedError, match=r"linf and l2, not for 'l1:0\.1'"):
        estimate(trace(model, x), region(hf.L1(0.1), x, sound=False), noise=noise)
