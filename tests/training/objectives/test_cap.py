"""Training on the convex adversarial polytope: the loss is that of the exact bound, and its recipes train."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace_batch
from holdfast.certificates.cap import cap_margins
from holdfast.data import Dataset, load_data
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.training import load_recipe, train
from holdfast.training.objectives.cap import cap, polytope_bound, projected_bound

THREATS = [hf.Linf(0.05), hf.L2(0.2), hf.L1(0.3)]
RECIPES = ("mnist-cap", "cifar10-cap", "mnist-mini-cap")


def mlp(*sizes):
    torch.manual_seed(2)
    layers = [nn.Linear(sizes[0], sizes[1])]
    for a, b in pairwise(sizes[1:]):
        layers += [nn.ReLU(), nn.Linear(a, b)]
    return nn.Sequential(*layers)


def small_cnn():
    torch.manual_seed(2)
    convs = [nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def problem():
    torch.manual_seed(5)
    return small_cnn(), torch.rand(6, 1, 7, 5), torch.arange(6) % 3


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_the_loss_is_the_cross_entropy_of_the_dual_margins(problem, threat):
    model, x, y = problem
    loss, metrics = cap(model, x, y, make_context(x, threat))
    graph, logits = trace_batch(model, x)
    margins = cap_margins(graph, region(threat, x, sound=False), y, sound=False)
    assert math.isclose(loss.item(), cross_entropy(-margins, y).item(), rel_tol=1e-5)
    proved = (margins > 0).scatter(1, y[:, None], True).all(1)
    assert metrics["verified"].item() == pytest.approx(proved.float().mean().item())
    assert metrics["accuracy"].item() == pytest.approx((logits.argmax(1) == y).float().mean().item())


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_the_margins_are_those_of_the_certificates(problem, threat):
    model, x, _ = problem
    y = model(x).argmax(1)
    margins, _ = polytope_bound(trace_batch(model, x)[0], region(threat, x, sound=False), y)
    worst = margins.scatter(1, y[:, None], torch.inf).amin(1)
    for method in ("cap", "fastlin"):
        assert torch.allclose(worst, hf.certify(model.eval(), x, y, threat, method, sound=False).margin, atol=1e-5)


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_no_sampled_input_has_a_larger_loss_or_a_smaller_margin(problem, threat):
    model, x, y = problem
    loss, _ = cap(model, x, y, make_context(x, threat))
    margins, _ = polytope_bound(trace_batch(model, x)[0], region(threat, x, sound=False), y)
    count = 500
    points = threat.random_start(x.repeat(count, 1, 1, 1), Noise.for_batch(1, count * len(x)))
    logits = model(points).view(count, len(x), 3)
    found = logits.gather(2, y.expand(count, -1)[..., None]) - logits
    assert bool((found >= margins - 1e-5).all())
    worst = cross_entropy(logits.flatten(0, 1), y.repeat(count), reduction="none").view(count, -1).amax(0).mean()
    assert worst.item() <= loss.item() + 1e-6


def test_kappa_mixes_in_the_clean_loss_along_the_rise_of_the_budget(problem):
    model, x, y = problem
    clean = cross_entropy(model(x), y).item()
    robust = cap(model, x, y, make_context(x, THREATS[0]))[0].item()
    assert robust > clean + 1e-3
    for ramp, kappa in ((0.0, 0.8), (0.5, 0.5), (1.0, 0.2)):
        loss, _ = cap(model, x, y, make_context(x, THREATS[0], ramp=ramp), kappa_start=0.8, kappa_end=0.2)
        assert loss.item() == pytest.approx(kappa * clean + (1 - kappa) * robust, rel=1e-5)
        default, _ = cap(model, x, y, make_context(x, THREATS[0], ramp=ramp))
        assert default.item() == pytest.approx(robust, rel=1e-6)


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_gradients_of_the_exact_loss_equal_finite_differences(threat):
    model = mlp(3, 6, 6, 3).double()
    x, y = torch.rand(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])

    def loss():
        return cap(model, x, y, make_context(x, threat))[0]

    gradients = torch.autograd.grad(loss(), list(model.parameters()))
    assert all(g.abs().max().item() > 1e-4 for g in gradients)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        for k in (0, p.numel() // 2, p.numel() - 1):
            values = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    p.view(-1)[k] += step
                    values.append(loss().item())
                    p.view(-1)[k] -= step
            finite = (values[0] - values[1]) / 2e-6
            assert math.isclose(finite, gradient.flatten()[k].item(), rel_tol=1e-4, abs_tol=1e-7)


@pytest.mark.parametrize("projections", [None, 10])
@pytest.mark.parametrize("size", [1, 6])
def test_batches_of_any_size_have_finite_gradients(problem, projections, size):
    model, x, y = problem
    loss, metrics = cap(model, x[:size], y[:size], make_context(x[:size], THREATS[0]), projections=projections)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    assert any(g.abs().max().item() > 0 for g in gradients)
    assert set(metrics) >= {"accuracy", "verified", "robust_loss"}


def test_an_empty_batch_has_margins_for_nobody(problem):
    model, x, y = problem
    graph, _ = trace_batch(model, x[:0])
    bound = projected_bound(5, Noise.for_batch(0, 0))
    assert bound(graph, region(THREATS[0], x[:0], sound=False), y[:0])[0].shape == (0, 3)


def test_projections_approach_the_exact_loss_and_belong_to_the_seed(problem):
    model, x, y = problem
    exact = cap(model, x, y, make_context(x, THREATS[0]))[0].item()

    def loss(projections, seed=0):
        return cap(model, x, y, make_context(x, THREATS[0], seed=seed), projections=projections)[0].item()

    assert loss(10) == loss(10)
    assert loss(10) != loss(10, seed=1)
    rough = sum(abs(loss(10, seed) - exact) for seed in range(8)) / 8
    fine = sum(abs(loss(2000, seed) - exact) for seed in range(8)) / 8
    assert fine < 0.3 * rough
    assert fine < 0.01 * exact


def test_without_a_budget_the_loss_is_the_clean_one(problem):
    model, x, y = problem
    for projections in (None, 5):
        loss, _ = cap(model, x, y, make_context(x, hf.Linf(0.0)), projections=projections)
        assert loss.item() == pytest.approx(cross_entropy(model(x), y).item(), rel=1e-6)


def test_projections_are_refused_for_l1(problem):
    model, x, y = problem
    with pytest.raises(UnsupportedError, match="linf and l2"):
        cap(model, x, y, make_context(x, hf.L1(0.1)), projections=5)


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_load(name):
    recipe = load_recipe(name)
    assert recipe.objective.name == "cap"
    assert recipe.objective.options["kappa_start"] == recipe.objective.options["kappa_end"] == 0.0
    assert recipe.adversary.name == "linf"
    with pytest.raises(InputError, match=r"objective.projections: expected an integer >= 1, got 0"):
        load_recipe(name, {"objective.projections": 0})


def test_the_recipe_for_the_embedded_data_lowers_the_loss_at_the_full_budget():
    data = load_data("mnist-mini")
    few = Dataset("mnist-mini", data.train[:160], data.test[:10], data.classes)
    changes = {"epochs": 2, "batch_size": 16, "budget": {"name": "constant"}, "threat": "linf:0.02"}
    result = train("mnist-mini-cap", data=few, progress=False, **changes)
    first, last = result.history
    assert last["train_loss"] < first["train_loss"]
    assert all(math.isfinite(value) for row in result.history for value in row.values())
    assert 0 < last["train_verified"] <= 1
