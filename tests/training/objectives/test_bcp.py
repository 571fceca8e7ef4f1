"""Training by balls and boxes: the loss is that of the certificate, its gradient is right, its recipes train."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.bounding.ball_box.margin import margins, outer_bound, proven_norm
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace_batch
from holdfast.certificates.bcp import bcp as certificate
from holdfast.data import Dataset, load_data
from holdfast.errors import InputError
from holdfast.models import make_model
from holdfast.random import Noise
from holdfast.training import load_recipe, train
from holdfast.training.objectives.bcp import bcp

RECIPES = ("mnist-bcp", "cifar10-bcp", "mnist-mini-bcp")


def small_cnn():
    torch.manual_seed(2)
    convs = [nn.Conv2d(1, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture
def problem():
    model = small_cnn()
    torch.manual_seed(5)
    return model, torch.rand(6, 1, 7, 5), torch.arange(6) % 3


@pytest.mark.parametrize("threat", [hf.L2(0.2), hf.Linf(0.05), hf.L1(0.3)], ids=str)
def test_the_loss_is_the_cross_entropy_of_the_proven_margins_once_the_norms_have_converged(problem, threat):
    model, x, y = problem
    loss, metrics = bcp(model, x, y, make_context(x, threat), power_steps=1, solver_steps=50)
    state = {}
    for _ in range(20):
        loss, metrics = bcp(model, x, y, make_context(x, threat, state=state), power_steps=20, solver_steps=50)
    o = outer_bound(trace_batch(model, x)[0], region(threat, x, sound=False), proven_norm(), sound=False)
    m = margins(o, y)
    assert loss.item() == pytest.approx(cross_entropy(-m, y).item(), rel=2e-3)
    assert metrics["radius"].item() == pytest.approx(o.rho.mean().item(), rel=2e-3)
    assert metrics["verified"].item() <= metrics["accuracy"].item()
    points = threat.random_start(x.repeat(300, 1, 1, 1), Noise.for_batch(1, 300 * len(x)))
    sampled = cross_entropy(model(points), y.repeat(300), reduction="none").view(300, -1).amax(0).mean()
    assert sampled.item() <= loss.item() + 1e-4


def test_kappa_mixes_in_the_clean_loss_along_the_rise_of_the_budget(problem):
    model, x, y = problem
    clean = cross_entropy(model(x), y).item()
    robust = bcp(model, x, y, make_context(x, hf.L2(0.2)))[0].item()
    assert robust > clean + 5e-3
    for ramp in (0.0, 0.5, 1.0):
        loss, _ = bcp(model, x, y, make_context(x, hf.L2(0.2), ramp=ramp))
        assert loss.item() == pytest.approx((1 - ramp) * clean + ramp * robust, rel=1e-5)
        loss, _ = bcp(model, x, y, make_context(x, hf.L2(0.2), ramp=ramp), kappa_start=0.5, kappa_end=0.5)
        assert loss.item() == pytest.approx((clean + robust) / 2, rel=1e-5)


def test_without_a_budget_it_is_plain_training_bit_for_bit():
    torch.manual_seed(0)
    models = [make_model("cnn", input_shape=(1, 8, 8), layers=[[4, 3, 1, 1]], hidden=[8], seed=1) for _ in range(2)]
    x, y = torch.rand(12, 1, 8, 8), torch.arange(12) % 10
    loss, metrics = bcp(models[0], x, y, make_context(x, hf.L2(0.0), ramp=0.0))
    plain = cross_entropy(models[1](x), y)
    assert torch.equal(loss, plain)
    ours, theirs = (torch.autograd.grad(v, list(m.parameters())) for v, m in zip((loss, plain), models, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert metrics["verified"] == metrics["accuracy"]


def test_fewer_solver_steps_give_a_larger_loss(problem):
    model, x, y = problem
    losses = [bcp(model, x, y, make_context(x, hf.L2(0.4)), solver_steps=steps)[0].item() for steps in (1, 2, 20)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def test_the_gradient_equals_finite_differences_with_converged_norms():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = torch.rand(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    state = {}

    def loss(power_steps=100):
        context = make_context(x, hf.L2(0.3), state=state)
        return bcp(model, x, y, context, power_steps=power_steps, solver_steps=50)[0]

    for _ in range(2):  # the first call has no vectors to start from, and takes a fixed number of steps
        loss(3000)
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
            assert math.isclose(finite, gradient.flatten()[k].item(), rel_tol=1e-3, abs_tol=1e-6)


def test_the_vectors_of_the_norms_live_in_the_state(problem):
    model, x, y = problem
    state = {}
    context = make_context(x, hf.L2(0.2), state=state)
    bcp(model, x, y, context)
    before = {key: value.clone() for key, value in state.items()}
    assert len(before) == 3  # two convolutions and a dense layer; of the last layer the rows count
    assert not any(value.requires_grad for value in state.values())
    bcp(model, x, y, context)
    assert state.keys() == before.keys()
    assert any(not torch.equal(state[key], before[key]) for key in before)


@pytest.mark.parametrize("size", [1, 6])
def test_batches_of_any_size_have_finite_gradients(problem, size):
    model, x, y = problem
    loss, metrics = bcp(model, x[:size], y[:size], make_context(x[:size], hf.L2(0.2)))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    assert all(g.abs().max().item() > 0 for g in gradients)
    assert set(metrics) == {"accuracy", "verified", "robust_loss", "radius"}


def test_batch_norm_trains_on_the_statistics_of_the_batch(problem):
    model, x, y = problem
    model.train()
    before = model[1].running_mean.clone()
    loss, _ = bcp(model, x, y, make_context(x, hf.L2(0.1)))
    loss.backward()
    assert not torch.equal(model[1].running_mean, before)
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_the_proven_radius_grows_on_a_toy_problem():
    torch.manual_seed(1)
    y = torch.arange(80) % 2
    x = 0.5 + (2 * y[:, None] - 1) * torch.tensor([0.2, 0.1]) + 0.05 * torch.randn(80, 2)
    x = x.clamp(0, 1)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer, state = torch.optim.Adam(model.parameters(), lr=1e-2), {}

    def proved():
        return certificate(model.eval(), x, y, hf.L2(0.05)).certified.float().mean().item()

    start = proved()
    for _ in range(100):
        loss, _ = bcp(model, x, y, make_context(x, hf.L2(0.1), state=state))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert proved() > max(start + 0.3, 0.8)


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_load(name):
    recipe = load_recipe(name)
    assert recipe.objective.name == "bcp"
    assert recipe.objective.options["kappa_start"] == 1.0
    assert recipe.objective.options["kappa_end"] == 0.0
    assert recipe.adversary.name == "l2"
    with pytest.raises(InputError, match=r"objective.solver_steps: expected an integer >= 1, got 0"):
        load_recipe(name, {"objective.solver_steps": 0})


def test_the_published_settings():
    mnist, cifar = load_recipe("mnist-bcp"), load_recipe("cifar10-bcp")
    assert (mnist.adversary.budget, cifar.adversary.budget) == (1.58, 36 / 255)
    assert (mnist.epochs, cifar.epochs) == (60, 200)
    assert mnist.objective.options["solver_steps"] == 10
    assert cifar.objective.options["solver_steps"] == 1
    assert [
        sum(p.numel() for p in make_model("4c3f", input_shape=s).parameters()) for s in ((1, 28, 28), (3, 32, 32))
    ] == [
        1_974_762,
        2_466_858,
    ]


def test_the_recipe_for_the_embedded_data_trains():
    data = load_data("mnist-mini")
    few = Dataset("mnist-mini", data.train[:200], data.test[:10], data.classes)
    budget = {"name": "constant"}
    changes = {"epochs": 3, "batch_size": 20, "budget": budget, "threat": "l2:0.1", "evaluate.certify": "bcp"}
    result = train("mnist-mini-bcp", data=few, progress=False, **changes)
    first, last = result.history[0], result.history[-1]
    assert last["train_loss"] < first["train_loss"]
    assert all(math.isfinite(value) for row in result.history for value in row.values())
    assert 0 < last["train_verified"] <= last["train_accuracy"] <= 1
    assert 0 <= last["validation_certified"] <= last["validation_robust"]
