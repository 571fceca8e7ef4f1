"""Losses that compare the outputs at x and x': each against its formula, written out."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from contexts import make_context
from holdfast import L2, Linf
from holdfast.training import train
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Parts
from holdfast.training.objectives.alp import alp
from holdfast.training.objectives.at import at
from holdfast.training.objectives.mart import margin_loss, mart
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.trades import trades
from holdfast.training.regularizers.trh import trh
from holdfast.training.step import divergence, inner_loss
from holdfast.training.targets import adaptive


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.rand(10, 4, dtype=torch.float64), torch.arange(10) % 3


def given_points(x_adv):
    """An attack that answers with these points, so that the loss can be computed by hand."""
    return Parts(attack=lambda model, x, y, loss, context: x_adv)


def kl(z, z_adv):
    s, s_adv = z.softmax(1), z_adv.softmax(1)
    return (s * (s.log() - s_adv.log())).sum(1)


def gradients(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


# -- Formulas --


def trades_by_hand(z, z_adv, y, anchor):
    return cross_entropy(z, y, reduction="none") + 6 * kl(anchor, z_adv)


def alp_by_hand(z, z_adv, y, anchor):
    gap = anchor.softmax(1) - z_adv.softmax(1)
    return cross_entropy(z_adv, y, reduction="none") + 0.5 * gap.square().sum(1)


def alp_of_logits_by_hand(z, z_adv, y, anchor):
    return cross_entropy(z_adv, y, reduction="none") + 0.5 * (anchor - z_adv).square().sum(1)


def mart_by_hand(z, z_adv, y, anchor, at=None):
    s, s_adv = anchor.softmax(1), z_adv.softmax(1)
    rows = torch.arange(len(y))
    others = s_adv.clone()
    others[rows, y] = -1.0
    margin = -(1 - others.max(1).values).log()
    at = z_adv if at is None else at
    return -at.softmax(1)[rows, y].log() + margin + 5 * kl(anchor, z_adv) * (1 - s[rows, y])


def at_by_hand(z, z_adv, y, anchor):
    return cross_entropy(z_adv, y, reduction="none") + 2.5 * kl(anchor, z_adv)


FORMULAS = {
    "trades": (trades, trades_by_hand),
    "alp": (alp, alp_by_hand),
    "alp of logits": (partial(alp, pair="logits"), alp_of_logits_by_hand),
    "mart": (mart, mart_by_hand),
    "mart, clean": (partial(mart, fit_at="clean"), lambda z, z_adv, y, a: mart_by_hand(z, z_adv, y, a, at=z)),
    "at": (partial(at, divergence_weight=2.5), at_by_hand),
}


# The anchor of fine-tuning always keeps its gradient.
@pytest.mark.parametrize(("name", "stop"), [(n, s) for n in FORMULAS for s in (False, True) if n != "at" or not s])
def test_loss_and_gradient_by_hand(problem, name, stop):
    model, x, y = problem
    objective, by_hand = FORMULAS[name]
    x_adv = (x + 0.2 * torch.randn_like(x)).clamp(0, 1)
    options = {} if name == "at" else {"stop_gradient": stop}
    loss, metrics = objective(model, x, y, make_context(x, Linf(0.1), given_points(x_adv)), **options)
    z, z_adv = model(x), model(x_adv)
    expected = by_hand(z, z_adv, y, z.detach() if stop else z).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert torch.allclose(gradients(loss, model), gradients(expected, model), atol=1e-9)
    assert float(metrics["accuracy"]) == pytest.approx((z_adv.argmax(1) == y).double().mean().item())


def test_stopping_the_gradient_makes_a_difference(problem):
    model, x, y = problem
    x_adv = (x + 0.2 * torch.randn_like(x)).clamp(0, 1)
    for objective in (trades, alp, mart):
        kept, stopped = (
            gradients(objective(model, x, y, make_context(x, None, given_points(x_adv)), stop_gradient=stop)[0], model)
            for stop in (False, True)
        )
        assert not torch.allclose(kept, stopped, atol=1e-4)


@pytest.mark.parametrize("objective", [trades, alp, mart])
@pytest.mark.parametrize(("weight", "stops"), [(None, False), (0.0, False), (1e-3, True)])
def test_the_gradient_is_stopped_by_default_where_curvature_is_penalised(problem, objective, weight, stops):
    model, x, y = problem
    x_adv = (x + 0.2 * torch.randn_like(x)).clamp(0, 1)

    def step(weight, **options):
        regularizers = {} if weight is None else {"trh": partial(trh, weight=weight)}
        parts = Parts(attack=given_points(x_adv).attack, regularizers=regularizers, top="2")
        return gradients(objective(model, x, y, make_context(x, None, parts), **options)[0], model)

    assert torch.equal(step(weight), step(weight, stop_gradient=stops))
    if weight == 0:
        assert torch.equal(step(weight), step(None))


def test_the_pairing_of_outputs_is_at_most_two(problem):
    """Two distributions are never further apart than the square root of two."""
    model, x, y = problem
    with torch.no_grad():
        model[0].weight.mul_(50)
        model[2].weight.mul_(50)
    x_adv = torch.rand_like(x)
    pairing = (model(x).softmax(1) - model(x_adv).softmax(1)).square().sum(1)
    assert pairing.max() > 1.5  # the bound is nearly met
    without, with_pair = (
        alp(model, x, y, make_context(x, None, given_points(x_adv)), weight=weight)[0].item() for weight in (0.0, 1.0)
    )
    assert with_pair - without == pytest.approx(pairing.mean().item())
    assert 0 < with_pair - without <= 2


logits = st.lists(st.floats(-30, 30), min_size=3, max_size=3).map(lambda z: torch.tensor([z], dtype=torch.float64))


@given(logits, logits)
def test_divergence_is_not_negative_and_zero_for_equal_outputs(z, z_adv):
    assert divergence(z, z_adv).item() >= -1e-12
    assert divergence(z, z).item() == 0
    assert divergence(z, z + 3).item() == pytest.approx(0, abs=1e-12)


@given(logits, logits, st.integers(0, 2))
def test_the_terms_of_mart_are_not_negative(z, z_adv, label):
    y = torch.tensor([label])
    identity = nn.Identity()
    context = make_context(z, None, given_points(z_adv))
    without = mart(identity, z, y, context, weight=0.0)[0].item()
    fitted = cross_entropy(z_adv, y).item()
    assert without >= fitted - 1e-9
    assert mart(identity, z, y, make_context(z, None, given_points(z_adv)))[0].item() >= without - 1e-9


def test_mart_gives_no_weight_to_the_divergence_of_sure_and_right_inputs():
    identity, y = nn.Identity(), torch.tensor([0])
    z, z_adv = torch.tensor([[40.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    losses = [
        mart(identity, z, y, make_context(z, None, given_points(z_adv)), weight=w)[0].item() for w in (0.0, 100.0)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    doubt = torch.tensor([[-2.0, 0.0, 0.0]])
    context = make_context(z, None, given_points(z_adv))
    assert mart(identity, doubt, y, context, weight=100.0)[0].item() > losses[0] + 1


def test_mart_is_finite_where_the_wrong_class_is_certain():
    z = torch.tensor([[0.0, 200.0]], requires_grad=True)
    loss, _ = mart(nn.Identity(), z, torch.tensor([0]), make_context(z, None, given_points(z)))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()
    z = torch.tensor([[0.3, -0.2, 0.9]])
    s = z.softmax(1)
    assert margin_loss(z, torch.tensor([0])).item() == pytest.approx(-torch.log(1 - s[0, 2]).item(), rel=1e-5)
    assert margin_loss(z, torch.tensor([2])).item() == pytest.approx(-torch.log(1 - s[0, 0]).item(), rel=1e-5)


# -- What they become at the ends of their options --

EQUALS = [
    (partial(trades, weight=0.0), standard),
    (partial(alp, weight=0.0), at),
    (partial(at, divergence_weight=0.0), at),
]


@pytest.mark.parametrize(("objective", "simpler"), EQUALS)
def test_weight_zero_is_the_simpler_objective(problem, objective, simpler):
    model, x, y = problem
    parts = Parts(attack=partial(pgd, steps=2))
    loss, _ = objective(model, x, y, make_context(x, Linf(0.1), parts))
    expected, _ = simpler(model, x, y, make_context(x, Linf(0.1), parts))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(gradients(loss, model), gradients(expected, model), atol=1e-12)


@pytest.mark.parametrize("threat", [Linf(0.0), L2(0.0)])
@pytest.mark.parametrize(
    ("objective", "clean"),
    [
        (at, standard),
        (partial(at, divergence_weight=3.0), standard),
        (trades, standard),
        (alp, standard),
        (mart, partial(mart, weight=0.0)),
    ],
)
def test_without_a_budget_there_is_only_the_clean_loss(problem, threat, objective, clean):
    model, x, y = problem
    parts = Parts(attack=partial(pgd, steps=2))
    loss, _ = objective(model, x, y, make_context(x, threat, parts))
    expected, _ = clean(model, x, y, make_context(x, threat, parts))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert torch.allclose(gradients(loss, model), gradients(expected, model), atol=1e-9)


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


# -- The inner maximum --


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


# -- Fine-tuning --


@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_weights_of_examples_apply_to_fit_and_divergence(problem, beta):
    """sum of w (CE + lambda KL) / sum of w, w the probability of the label at x'; also with learned targets."""
    model, x, y = problem
    x_adv = (x + 0.2 * torch.randn_like(x)).clamp(0, 1)
    parts = Parts(
        attack=given_points(x_adv).attack, targets=partial(adaptive, beta=beta, rho=0.5, reweight=True, start=0)
    )
    loss, _ = at(model, x, y, make_context(x, Linf(0.1), parts), divergence_weight=6.0)
    z, z_adv = model(x), model(x_adv)
    w = z_adv.softmax(1)[torch.arange(10), y].detach()
    moving = 0.5 * one_hot(y, 3) + 0.5 * z_adv.softmax(1).detach()
    each = cross_entropy(z_adv, beta * one_hot(y, 3) + (1 - beta) * moving, reduction="none") + 6 * kl(z, z_adv)
    expected = (w * each).sum() / w.sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert torch.allclose(gradients(loss, model), gradients(expected, model), atol=1e-9)
