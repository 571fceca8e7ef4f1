"""SPSA and NES: estimates against the true gradient, closed forms, and a model without gradients."""

import math
from dataclasses import replace

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.estimate import Estimate
from holdfast.attacks.core.losses import margin
from holdfast.attacks.nes import gaussian, nes
from holdfast.attacks.spsa import rademacher, spsa
from holdfast.errors import InputError
from holdfast.random import Noise

ATTACKS = {"spsa": spsa, "nes": nes}


class PlainLinear(nn.Module):
    """Linear, with sums that do not depend on the batch to the last bit; counts the inputs that it is asked about."""

    def __init__(self, size, classes, steps=None):
        super().__init__()
        self.register_buffer("weight", torch.randn(classes, size, dtype=torch.float64))
        self.steps, self.asked = steps, 0
        self.eval()

    def forward(self, x):
        self.asked += len(x)
        flat = x.flatten(1)
        if self.steps is not None:
            flat = (flat * self.steps).round() / self.steps
        return ((flat - 0.5)[:, None] * self.weight).sum(2)


def task(model, count, shape):
    x = 0.3 + 0.4 * torch.rand(count, *shape, dtype=torch.float64)
    return x, model(x).argmax(1)


@pytest.mark.parametrize("draw", [rademacher, gaussian])
def test_the_estimate_comes_near_the_gradient_of_a_linear_model(draw):
    torch.manual_seed(0)
    model = PlainLinear(70, 2)
    x, y = task(model, 5, (7, 10))
    estimate = Estimate(draw, 4001, 0.01, 500)(model, x, y, Noise.for_batch(0, 5)).flatten(1)
    exact = model.weight[1 - y] - model.weight[y]
    # The error of one entry has the standard deviation |g| / sqrt(directions), about.
    error = (estimate - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) < 1.3 * math.sqrt(70 / 4001)
    assert model.asked == 5 + 2 * 4001 * 5


@pytest.mark.parametrize("name", list(ATTACKS))
@pytest.mark.parametrize(("threat", "share"), [(hf.Linf(0.05), 0.98), (hf.L2(0.2), 0.9)], ids=str)
def test_the_worst_case_of_a_linear_model(name, threat, share):
    torch.manual_seed(1)
    model = PlainLinear(16, 2)
    x, y = task(model, 20, (16,))
    gap = model.weight[1 - y] - model.weight[y]
    clean, reach = margin(model(x), y), threat.eps * threat.dual_norm(gap)
    result = ATTACKS[name](model, x, y, threat, steps=60, samples=128)
    gained = (margin(model(result.x_adv), y) - clean) / reach
    held = ~result.success
    assert bool(held.any())
    assert bool(result.success.any())
    assert bool((gained <= 1 + 1e-9).all())
    assert float(gained[held].min()) > share
    assert bool(result.success[clean + share * reach > 0].all())
    assert not bool(result.success[clean + reach <= 0].any())


@pytest.mark.parametrize("name", list(ATTACKS))
@pytest.mark.parametrize("threat", [hf.Linf(0.15), hf.L2(0.8)], ids=str)
def test_a_model_without_gradients_is_broken(name, threat):
    torch.manual_seed(2)
    model = PlainLinear(25, 3, steps=20)
    x, y = task(model, 20, (1, 5, 5))
    probe = {"spsa": {"delta": 0.03}, "nes": {"sigma": 0.03}}[name]
    result = hf.attack(model, x, y, threat, name, steps=30, **probe)
    assert float(result.success.double().mean()) > 0.9
    assert int(result.gradients.sum()) == 0


@pytest.mark.parametrize("name", list(ATTACKS))
@pytest.mark.parametrize("threat", [hf.Linf(0.04), hf.L2(0.15)], ids=str)
def test_the_answer_does_not_depend_on_batch_or_chunk(name, threat):
    torch.manual_seed(3)
    model = PlainLinear(24, 4)
    x, y = task(model, 30, (2, 3, 4))
    noise = Noise(3, torch.arange(30) * 7)
    options = {"steps": 6, "samples": 22}
    run = ATTACKS[name]
    whole = run(model, x, y, threat, noise=noise, **options)
    assert 0 < int(whole.success.sum()) < 30
    order = torch.randperm(30)
    mixed = run(model, x[order], y[order], threat, noise=noise[order], chunk=70, **options)
    assert torch.equal(mixed.x_adv, whole.x_adv[order])
    assert torch.equal(mixed.queries, whole.queries[order])
    for i in (0, 11, 29):
        one = slice(i, i + 1)
        alone = run(model, x[one], y[one], threat, noise=noise[one], chunk=1, **options)
        assert torch.equal(alone.x_adv, whole.x_adv[one])
        assert torch.equal(alone.queries, whole.queries[one])


@pytest.mark.parametrize("name", list(ATTACKS))
@pytest.mark.parametrize("threat", [hf.Linf(0.1), hf.L2(0.5), hf.Linf(0.6), hf.L2(5.0)], ids=str)
def test_points_stay_in_the_set_and_successes_are_misclassified(name, threat):
    torch.manual_seed(4)
    for model, shape in tiny_nets().values():
        x = torch.rand(5, *shape).round(decimals=1)
        y = model(x).argmax(1)
        result = ATTACKS[name](model, x, y, threat, steps=8, samples=10, step_size=0.1)
        assert bool(threat.contains(result.x_adv, x).all())
        assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)
        assert tuple(by == name for by in result.by) == tuple(result.success.tolist())


@pytest.mark.parametrize("name", list(ATTACKS))
def test_queries_are_counted_and_capped(name):
    torch.manual_seed(5)
    model = PlainLinear(9, 3)
    x, y = task(model, 1, (9,))
    for eps, queries, spent in ((0.0, 36, 34), (0.0, 34, 34), (0.0, 33, 23), (0.0, None, 1 + 7 * 11), (0.6, 60, None)):
        model.asked = 0
        result = ATTACKS[name](model, x, y, hf.Linf(eps), steps=7, samples=10, queries=queries, step_size=0.1)
        assert model.asked == int(result.queries)
        assert int(result.queries) == spent or (spent is None and bool(result.success))
    y[0] = (y[0] + 1) % 3
    assert int(ATTACKS[name](model, x, y, hf.Linf(0.1)).queries) == 1


@pytest.mark.parametrize("name", list(ATTACKS))
def test_no_budget_changes_nothing_and_more_breaks_no_fewer(name):
    torch.manual_seed(6)
    model = PlainLinear(9, 5)
    x, y = task(model, 30, (9,))
    threat = hf.Linf(0.0)
    results = [ATTACKS[name](model, x, y, replace(threat, eps=e), steps=15, samples=40) for e in (0.0, 0.03, 0.1, 0.3)]
    assert torch.equal(results[0].x_adv, x)
    counts = [int(result.success.sum()) for result in results]
    assert counts == sorted(counts)
    assert counts[0] == 0 < counts[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"samples": 7}, "even"),
        ({"samples": 0}, "expected an integer >= 1, got 0"),
        ({"queries": 51, "samples": 50}, "at least 52"),
        ({"chunk": 0}, "chunk"),
        ({"step_size": 0.0}, "step_size"),
    ],
)
@pytest.mark.parametrize("name", list(ATTACKS))
def test_bad_options_are_refused(name, options, message):
    model = PlainLinear(9, 3)
    x, y = task(model, 2, (9,))
    with pytest.raises(InputError, match=message):
        hf.attack(model, x, y, hf.Linf(0.1), name, **options)


def test_probes_need_a_distance():
    model = PlainLinear(9, 3)
    x, y = task(model, 2, (9,))
    with pytest.raises(InputError, match=r"'delta' .*: expected a number > 0"):
        hf.attack(model, x, y, hf.Linf(0.1), "spsa", delta=0.0)
    with pytest.raises(InputError, match=r"'sigma' .*: expected a number > 0"):
        hf.attack(model, x, y, hf.Linf(0.1), "nes", sigma=-1.0)
