"""TRADES: what its attack maximises, and what it is without a weight."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast import Linf
from holdfast.training import train
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Parts
from holdfast.training.objectives.alp import alp
from holdfast.training.objectives.at import at
from holdfast.training.objectives.mart import mart
from holdfast.training.objectives.trades import trades
from holdfast.training.step import divergence, inner_loss
from paired_tasks import kl


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.rand(10, 4, dtype=torch.float64), torch.arange(10) % 3


def test_trades_without_a_weight_trains_as_if_without_an_adversary(toy_recipe, toy_data):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 2))

    toy_recipe |= {"evaluate": {"attack_steps": 2, "select": "clean"}}
    with_zero = train(toy_recipe, make(), toy_data, objective={"name": "trades", "weight": 0.0})
    plain = train({**toy_recipe, "attack": None, "objective": {"name": "standard"}}, make(), toy_data)
    for a, b in zip(with_zero.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert [r["train_loss"] for r in with_zero.history] == pytest.approx([r["train_loss"] for r in plain.history])


def test_trades_attacks_the_divergence_and_not_the_label(problem):
    model, x, y = problem
    loss = inner_loss("kl", model, x)
    z = model(x)
    assert torch.equal(loss(z, y), torch.zeros(10, dtype=torch.float64))
    other = torch.randn_like(z)
    assert torch.allclose(loss(other, y), kl(z, other))
    assert not loss(other, y).requires_grad
    seen = []

    def spy(model, x, y, loss, context):
        seen.append(loss)
        return x

    for objective in (trades, alp, mart, at):
        objective(model, x, y, make_context(x, Linf(0.1), Parts(attack=spy)))
    values = [loss(other, y) for loss in seen]
    assert torch.allclose(values[0], kl(z, other))
    for value in values[1:]:
        assert torch.allclose(value, cross_entropy(other, y, reduction="none"))


@pytest.mark.parametrize("random_start", [True, False])
def test_the_attack_raises_the_divergence(problem, random_start):
    """From x itself the gradient would vanish: the start is a little off."""
    model, x, y = problem
    found = []

    def attack(*arguments):
        found.append(pgd(*arguments, steps=5, random_start=random_start))
        return found[-1]

    trades(model, x, y, make_context(x, Linf(0.2), Parts(attack=attack)))
    assert (divergence(model(x), model(found[0])) > 1e-4).all()
    assert Linf(0.2).contains(found[0], x).all()


def test_the_clean_output_of_the_attack_is_that_of_the_network_in_use():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).train()
    x = torch.rand(10, 4)
    before = model[1].num_batches_tracked.item()
    loss = inner_loss("kl", model, x)
    assert model[1].num_batches_tracked.item() == before
    assert model.training
    z = model.eval()(x)
    assert torch.allclose(loss(z, torch.zeros(10, dtype=torch.int64)), torch.zeros(10), atol=1e-6)
