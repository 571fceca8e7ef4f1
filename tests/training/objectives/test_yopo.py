"""YOPO: several updates of the perturbation for each pass."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast import L2, Linf
from holdfast.training import train
from holdfast.training.objectives.free import free
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.yopo import yopo
from paired_tasks import THREATS, gradients, input_gradient


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.rand(6, 4, dtype=torch.float64), torch.arange(6) % 3


def by_hand(model, x, y, threat, noise, *, rounds, updates, step):
    """The points that are visited: `updates` steps along one direction between full passes."""
    point = threat.random_start(x, noise)
    visited = [point]
    for _ in range(rounds - 1):
        direction = input_gradient(model, point, y)
        for _ in range(updates):
            point = threat.project(point + step * threat.budget * direction.sign(), x)
        visited.append(point)
    return visited


def test_yopo_gradient_is_the_mean_over_the_points_visited(problem):
    model, x, y = problem
    context = make_context(x, Linf(0.1))
    loss, _ = yopo(model, x, y, context, rounds=4, updates=2, step=0.3)
    visited = by_hand(model, x, y, Linf(0.1), context.noise, rounds=4, updates=2, step=0.3)
    losses = [cross_entropy(model(point), y) for point in visited]
    assert loss.item() == pytest.approx(losses[-1].item())
    expected = torch.stack([gradients(value, model) for value in losses]).mean(0)
    assert torch.allclose(gradients(loss, model), expected)
    assert losses[-1] > losses[0]
    assert all(p.grad is None for p in model.parameters())


def test_yopo_of_one_round_trains_on_random_points(problem):
    model, x, y = problem
    context = make_context(x, Linf(0.1))
    loss, _ = yopo(model, x, y, context, rounds=1, updates=3)
    expected = cross_entropy(model(Linf(0.1).random_start(x, context.noise)), y)
    assert loss.item() == pytest.approx(expected.item())
    assert torch.allclose(gradients(loss, model), gradients(expected, model))


def test_yopo_with_parameters_that_do_not_take_part(problem):
    model, x, y = problem
    model[0].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    loss, _ = yopo(model, x, y, make_context(x, Linf(0.1)), rounds=3)
    loss.backward()
    assert model[0].bias.grad is None
    assert model.unused.grad is None or not model.unused.grad.any()
    assert model[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize("norm", THREATS)
def test_yopo_in_every_norm(problem, norm):
    model, x, y = problem
    seen = []
    handle = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    yopo(model, x, y, make_context(x, THREATS[norm]), rounds=4)
    handle.remove()
    assert len(seen) == 4
    assert all(THREATS[norm].contains(point, x).all() for point in seen)


@pytest.mark.parametrize("objective", [free, yopo])
@pytest.mark.parametrize("threat", [Linf(0.0), L2(0.0)])
def test_without_a_budget_they_are_plain_training(problem, objective, threat):
    model, x, y = problem
    loss, metrics = objective(model, x, y, make_context(x, threat))
    expected, plain = standard(model, x, y, make_context(x, threat))
    assert loss.item() == pytest.approx(expected.item())
    assert float(metrics["accuracy"]) == pytest.approx(float(plain["accuracy"]))
    assert torch.allclose(gradients(loss, model), gradients(expected, model))


@pytest.mark.parametrize("name", ["free", "yopo"])
def test_fast_objectives_learn(toy_recipe, make_toy_model, toy_data, name):
    recipe = {**toy_recipe, "attack": None, "objective": {"name": name}, "epochs": 3}
    history = train(recipe, make_toy_model(), toy_data).history
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert history[-1]["validation_robust"] > 0.8
