"""Moved weights: where they go, what the step then is, and what it leaves alone."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast import InputError, Linf
from holdfast.training import train
from holdfast.training.context import Parts
from holdfast.training.objectives.alp import alp
from holdfast.training.objectives.at import at
from holdfast.training.objectives.mart import mart
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.trades import trades
from holdfast.training.perturb_weights import awp, awp_top, sam
from holdfast.training.regularizers.grad_align import grad_align
from holdfast.training.regularizers.s2o import s2o
from holdfast.training.regularizers.trh import trh

MOVES = {"awp": awp, "awp-top": awp_top, "sam": sam}


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double().train()
    return model, torch.rand(10, 4, dtype=torch.float64), torch.arange(10) % 3


def values(weights):
    return {name: w.detach().clone() for name, w in weights.items()}


def loss_of(model, x, y):
    return lambda weights: cross_entropy(functional_call(model, dict(weights), (x,)), y)


# -- Where the weights go --


def test_awp_moves_each_matrix_by_its_share_along_the_gradient(problem):
    model, x, y = problem
    theta = values(dict(model.named_parameters()))
    moved = awp(model, loss_of(model, x, y), make_context(x, Linf(0.1)), delta=0.02)
    gradients = dict(zip(theta, torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters())), strict=True))
    for name, weight in theta.items():
        xi = moved[name].detach() - weight
        if name not in ("0.weight", "3.weight"):  # no biases, no scales of normalisation
            assert torch.equal(xi, torch.zeros_like(xi))
            continue
        assert (xi.norm() / weight.norm()).item() == pytest.approx(0.02)
        assert torch.allclose(xi / xi.norm(), gradients[name] / gradients[name].norm())


def test_awp_top_moves_the_top_layer_alone(problem):
    model, x, y = problem
    theta = values(dict(model.named_parameters()))
    moved = awp_top(model, loss_of(model, x, y), make_context(x, Linf(0.1), Parts(top="3")), delta=0.02)
    changed = [name for name, weight in theta.items() if not torch.equal(moved[name], weight)]
    assert changed == ["3.weight"]
    assert ((moved["3.weight"] - theta["3.weight"]).norm() / theta["3.weight"].norm()).item() == pytest.approx(0.02)


def test_awp_top_of_a_model_that_is_its_top_layer():
    model, x, y = nn.Linear(4, 3), torch.rand(6, 4), torch.arange(6) % 3
    theta = model.weight.detach().clone()
    moved = awp_top(model, loss_of(model, x, y), make_context(x, Linf(0.1), Parts(top="")), delta=0.1)
    assert ((moved["weight"] - theta).norm() / theta.norm()).item() == pytest.approx(0.1, rel=1e-5)


def test_sam_on_a_quadratic():
    """L = p.A p / 2: the move is rho A p / |A p| over all parameters together, the gradient there A (p + xi)."""
    a = torch.diag(torch.tensor([1.0, 4.0, 0.5, 2.0], dtype=torch.float64))
    model = nn.ParameterDict({"u": torch.tensor([1.0, -2.0]).double(), "v": torch.tensor([3.0, 0.5]).double()})

    def loss_at(weights):
        p = torch.cat([weights["u"], weights["v"]])
        return p @ a @ p / 2

    moved = sam(model, loss_at, make_context(torch.zeros(1, 1)), rho=0.3)
    p = torch.cat([model["u"], model["v"]]).detach()
    xi = 0.3 * (a @ p) / (a @ p).norm()
    assert torch.allclose(torch.cat([moved["u"], moved["v"]]), p + xi)
    gradient = torch.autograd.grad(loss_at(moved), [model["u"], model["v"]])
    assert torch.allclose(torch.cat(gradient), a @ (p + xi))


@pytest.mark.parametrize("name", MOVES)
def test_small_moves_raise_the_loss_and_leave_the_model_alone(problem, name):
    model, x, y = problem
    before = values(model.state_dict())
    at = loss_of(model, x, y)
    size = {"rho": 1e-3} if name == "sam" else {"delta": 1e-3}
    moved = MOVES[name](model, at, make_context(x, Linf(0.1), Parts(top="3")), **size)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert at(moved) > at(dict(model.named_parameters()))


def test_where_the_gradient_vanishes_nothing_moves():
    model, x = nn.Linear(2, 2, bias=False), torch.zeros(3, 2)
    for move in (awp, awp_top, sam):
        moved = move(model, loss_of(model, x, torch.tensor([0, 1, 1])), make_context(x, Linf(0.1), Parts(top="")))
        assert torch.equal(moved["weight"], model.weight)


@pytest.mark.parametrize("name", MOVES)
def test_nothing_moves_before_the_start_or_without_a_size(problem, name):
    model, x, y = problem
    size = "rho" if name == "sam" else "delta"
    at = loss_of(model, x, y)
    for epoch, options in ((0, {size: 0.0}), (2, {"start": 3})):
        assert MOVES[name](model, at, make_context(x, Linf(0.1), Parts(top="3"), epoch=epoch), **options) is None
    assert MOVES[name](model, at, make_context(x, Linf(0.1), Parts(top="3"), epoch=3), start=3) is not None


def test_frozen_weights_stay(problem):
    model, x, y = problem
    model[0].requires_grad_(False)
    for move in (awp, sam):
        moved = move(model, loss_of(model, x, y), make_context(x, Linf(0.1)))
        assert torch.equal(moved["0.weight"], model[0].weight)
        assert not torch.equal(moved["3.weight"], model[3].weight)


# -- The step --


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("objective", [standard, at, trades, alp, mart])
def test_the_gradient_of_the_step_is_that_at_the_moved_weights(problem, name, objective):
    """By hand: ascend on a copy, take the gradient there."""
    model, x, y = problem
    x_adv = (x + 0.1 * torch.randn_like(x)).clamp(0, 1)
    size = {"rho": 0.1} if name == "sam" else {"delta": 0.05}
    parts = {"attack": lambda *_: x_adv, "top": "3"}
    start = values(model.state_dict())
    loss, _ = objective(
        model, x, y, make_context(x, Linf(0.1), Parts(**parts, perturb_weights=partial(MOVES[name], **size)))
    )
    found = torch.autograd.grad(loss, list(model.parameters()))

    copy = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double().train()
    copy.load_state_dict(start)
    base, _ = objective(copy, x, y, make_context(x, Linf(0.1), Parts(**parts)))
    ascent = torch.autograd.grad(base, list(copy.parameters()))
    whole = torch.cat([g.flatten() for g in ascent]).norm()
    with torch.no_grad():
        for (key, p), g in zip(copy.named_parameters(), ascent, strict=True):
            if name == "sam":
                p += 0.1 * g / whole
            elif key == "3.weight" or (name == "awp" and key == "0.weight"):
                p += 0.05 * p.norm() * g / g.norm()
    there, _ = objective(copy, x, y, make_context(x, Linf(0.1), Parts(**parts)))
    expected = torch.autograd.grad(there, list(copy.parameters()))
    assert loss.item() == pytest.approx(there.item())
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(p, start[key]) for key, p in model.named_parameters())


@pytest.mark.parametrize("regularizer", [partial(trh, weight=0.1), partial(s2o), partial(grad_align)])
def test_regularisers_are_taken_at_the_moved_weights_too(problem, regularizer):
    model, x, y = problem
    model.eval()
    parts = {"regularizers": {"trh": regularizer}, "top": "3"}
    seen = []

    def move(model, loss_at, context):
        parameters = dict(model.named_parameters())
        seen.append(loss_at(parameters).item())
        return {**parameters, "3.weight": 1.5 * parameters["3.weight"]}

    loss, _ = standard(model, x, y, make_context(x, Linf(0.1), Parts(**parts, perturb_weights=move)))
    base, _ = standard(model, x, y, make_context(x, Linf(0.1), Parts(**parts)))
    assert seen[0] == pytest.approx(base.item())
    with torch.no_grad():
        model[3].weight.mul_(1.5)
    expected, _ = standard(model, x, y, make_context(x, Linf(0.1), Parts(**parts)))
    assert loss.item() == pytest.approx(expected.item())
    assert loss.item() != pytest.approx(base.item(), rel=1e-3)


@pytest.mark.parametrize("name", MOVES)
def test_batch_norm_sees_each_batch_once(problem, name):
    model, x, y = problem
    before = values(model.state_dict())
    parts = Parts(attack=lambda *_: x, top="3", perturb_weights=MOVES[name])
    at(model, x, y, make_context(x, Linf(0.1), parts))
    assert model[1].num_batches_tracked == before["1.num_batches_tracked"] + 1
    hidden = model[0](x)  # close to what batch norm saw: the first layer has moved by half a per cent
    expected = 0.9 * before["1.running_mean"] + 0.1 * hidden.mean(0)
    assert torch.allclose(model[1].running_mean, expected, atol=0.02)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


# -- Runs --


@pytest.mark.parametrize("name", MOVES)
def test_size_zero_is_the_base_method_bit_for_bit(toy_recipe, make_toy_model, toy_data, name):
    size = "rho" if name == "sam" else "delta"
    plain = train(toy_recipe, make_toy_model(), toy_data)
    none = train(toy_recipe, make_toy_model(), toy_data, perturb_weights={"name": name, size: 0.0})
    late = train(toy_recipe, make_toy_model(), toy_data, perturb_weights={"name": name, "start": 4})
    some = train(toy_recipe, make_toy_model(), toy_data, perturb_weights={"name": name, size: 0.05})
    weights = [list(run.model.state_dict().values()) for run in (plain, none, late, some)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights[0], weights[3], strict=True))


def test_awp_top_needs_a_linear_top_layer(toy_recipe, toy_data):
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 2), nn.Tanh())
    with pytest.raises(InputError, match=r"perturb_weights: the model Sequential does not end in a linear layer"):
        train(toy_recipe, model, toy_data, perturb_weights={"name": "awp-top"})
