"""Losses that compare the outputs at x and x': each against its formula, written out."""

from functools import partial

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from contexts import make_context
from holdfast import L2, Linf
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Parts
from holdfast.training.objectives.alp import alp
from holdfast.training.objectives.at import at
from holdfast.training.objectives.mart import mart
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.trades import trades
from holdfast.training.regularizers.trh import trh
from holdfast.training.step import divergence
from holdfast.training.targets import adaptive
from paired_tasks import given_points, gradients, kl, logits


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.rand(10, 4, dtype=torch.float64), torch.arange(10) % 3


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


@given(logits, logits)
def test_divergence_is_not_negative_and_zero_for_equal_outputs(z, z_adv):
    assert divergence(z, z_adv).item() >= -1e-12
    assert divergence(z, z).item() == 0
    assert divergence(z, z + 3).item() == pytest.approx(0, abs=1e-12)


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
