"""Measures of smoothness: closed forms on quadratics, the descent that they promise, and a model left as it was."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import holdfast as hf
from holdfast.analyze.smoothness import (
    FACTORS,
    gradient_change,
    gradient_change_between,
    loss_variation,
    record,
    target_alignment,
    weights,
)
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.training.objectives.core.certified import certified_loss, interval_bound, linear_bound

NOTHING = (torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))  # for losses of the weights alone


class Point(nn.Module):
    """A model that is nothing but its weights."""

    def __init__(self, theta):
        super().__init__()
        self.theta = nn.Parameter(theta)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spd(n, seed):
    root = normal(n, n, seed=seed)
    return root @ root.T + 0.1 * torch.eye(n, dtype=torch.float64)


def quadratic(h, centre, floor=0.0):
    return lambda model, x, y: (model.theta - centre) @ h @ (model.theta - centre) / 2 + floor


def ibp_loss(model, x, y):
    return certified_loss(model, x, y, hf.Linf(0.05), interval_bound)[0].mean()


def plain_loss(model, x, y):
    return cross_entropy(model(x), y)


def test_the_factors_are_none_one_and_ten_up_to_five():
    assert len(FACTORS) == 12
    assert FACTORS[0] == 0
    assert 1.0 in FACTORS
    rest = torch.tensor([f for f in FACTORS if f not in (0.0, 1.0)])
    assert rest[0] == 0.5
    assert rest[-1] == 5.0
    assert torch.allclose(rest[1:] / rest[:-1], torch.tensor(10.0 ** (1 / 9)))


@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([1e-3, 0.1, 2.0]))
@settings(max_examples=15)
def test_on_a_quadratic_the_measures_have_closed_forms(seed, n, lr):
    h, theta, centre = spd(n, seed), normal(n, seed=seed + 1), normal(n, seed=seed + 2)
    model, loss = Point(theta), quadratic(h, centre)
    g = h @ (theta - centre)
    change = gradient_change(model, loss, *NOTHING, lr=lr)
    assert change.difference == pytest.approx(lr * float((h @ g).norm()), rel=1e-9)
    assert change.rms == pytest.approx(change.difference / math.sqrt(n))
    later = g - lr * h @ g
    assert change.cosine_distance == pytest.approx(1 - float(g @ later / g.norm() / later.norm()), abs=1e-12)
    variation = loss_variation(model, loss, *NOTHING, lr=lr)
    exact = [float(loss(Point(theta - f * lr * g), *NOTHING).detach()) for f in FACTORS]
    assert variation.factors == FACTORS
    assert variation.values == pytest.approx(exact)
    assert (variation.low, variation.high) == (min(variation.values), max(variation.values))


def test_a_linear_loss_is_perfectly_smooth():
    slope = normal(7, seed=0)
    model, loss = Point(normal(7, seed=1)), lambda model, x, y: slope @ model.theta
    change = gradient_change(model, loss, *NOTHING, lr=0.1)
    assert (change.difference, change.rms, change.cosine_distance) == (0, 0, 0)
    variation = loss_variation(model, loss, *NOTHING, lr=0.1, factors=(0, 1, 5))
    size = 0.1 * float(slope @ slope)
    assert variation.high - variation.low == pytest.approx(5 * size)


@pytest.mark.parametrize("scale", [1e-3, 7.0, 1e5])
def test_the_cosine_distance_does_not_see_the_scale_of_the_loss(scale):
    model, shape = tiny_nets()["mlp"]
    x, y = torch.rand(8, *shape), torch.arange(8) % 3
    before, after = weights(model), weights(model) + 0.1 * torch.randn(len(weights(model)))
    one = gradient_change_between(model, plain_loss, x, y, before, after)
    other = gradient_change_between(model, lambda m, x, y: scale * plain_loss(m, x, y), x, y, before, after)
    assert other.cosine_distance == pytest.approx(one.cosine_distance, rel=1e-4)
    assert other.difference == pytest.approx(scale * one.difference, rel=1e-4)
    assert one.cosine_distance > 1e-4
    # The plain step is longer for a larger loss: only with the same step is the distance the same.
    plain = gradient_change(model, plain_loss, x, y, lr=0.1).cosine_distance
    scaled = gradient_change(model, lambda m, x, y: scale * plain_loss(m, x, y), x, y, lr=0.1 / scale).cosine_distance
    assert scaled == pytest.approx(plain, rel=1e-3)


@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([1.0, 1.5, 2.0, 10.0]), st.sampled_from([-1, 1]))
@settings(max_examples=40)
def test_a_step_on_one_loss_lowers_the_other_as_promised(seed, n, alpha, side):
    """L(theta') <= L (1 - mu / alpha cos^2 / |H u|) at both ends of the interval of steps for which it is proved."""
    h, theta = spd(n, seed), normal(n, seed=seed + 1)
    now, target = quadratic(spd(n, seed + 2), normal(n, seed=seed + 3)), quadratic(h, normal(n, seed=seed + 4), 0.3)
    gradients = []
    for loss in (now, target):
        point = Point(theta)
        gradients.append(torch.autograd.grad(loss(point, *NOTHING), point.theta)[0])
    d, g = gradients
    if g @ d < 0:  # the other half of the space: descend on the mirror image
        now, d = (lambda positive: lambda model, x, y: -positive(model, x, y))(now), -d
    best = float(g @ d / (d @ h @ d))
    lr = (1 + side * math.sqrt(1 - 1 / alpha)) * best
    found = target_alignment(Point(theta), now, target, *NOTHING, lr=lr)
    u = d / d.norm()
    assert found.cosine == pytest.approx(float(g @ d / g.norm() / d.norm()), abs=1e-9)
    assert found.curvature == pytest.approx(float((h @ u).norm()), rel=1e-6)
    assert float(u @ h @ u) <= found.curvature * (1 + 1e-6)
    start, end = (float(target(Point(at), *NOTHING).detach()) for at in (theta, theta - lr * d))
    mu = float(g @ g) / (2 * start)
    assert end <= start * (1 - mu / alpha * found.cosine**2 / found.curvature) + 1e-9 * start
    # Without the step from u.Hu to |Hu| the ends of the interval are where the inequality becomes an equation.
    assert end == pytest.approx(start * (1 - mu / alpha * found.cosine**2 / float(u @ h @ u)), rel=1e-6)


def test_the_angle_is_that_between_two_losses():
    """The numerator printed with one loss twice would give |d| / |g|, here 2, and not a cosine."""
    now, target = quadratic(2 * torch.eye(2), torch.zeros(2)), quadratic(torch.eye(2), torch.tensor([1.0, -1.0]))
    found = target_alignment(Point(torch.tensor([1.0, 0.0])), now, target, *NOTHING, lr=0.1)
    assert found.cosine == pytest.approx(0.0, abs=1e-7)  # d = (2, 0), g = (0, 1)
    assert found.difference == pytest.approx(0.2)
    assert found.rms == pytest.approx(0.2 / math.sqrt(2))
    assert target_alignment(Point(torch.tensor([1.0, 0.0])), now, now, *NOTHING, lr=0.1).cosine == pytest.approx(1.0)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("bound", [interval_bound, linear_bound(1.0, lambda r, y: None)])
def test_a_certified_loss_against_a_step_made_by_hand(bound, batch):
    model, shape = tiny_nets()["mlp"]
    x, y = torch.rand(batch, *shape), torch.arange(batch) % 3

    def loss(model, x, y):
        return certified_loss(model, x, y, hf.Linf(0.05), bound)[0].mean()

    def gradient(model):
        return parameters_to_vector(torch.autograd.grad(loss(model, x, y), model.parameters()))

    stepped, lr, before = copy.deepcopy(model), 0.5, weights(model)
    loss(stepped, x, y).backward()
    torch.optim.SGD(stepped.parameters(), lr=lr).step()
    a, b, after = gradient(model), gradient(stepped), weights(stepped)
    for found in (
        gradient_change(model, loss, x, y, lr=lr),
        gradient_change_between(model, loss, x, y, before, after),
    ):
        assert found.difference == pytest.approx(float((a - b).norm()), rel=1e-3)
        assert found.cosine_distance == pytest.approx(float(1 - torch.cosine_similarity(a, b, 0)), abs=1e-5)
        assert found.difference > 1e-3


def test_one_row_holds_all_measures():
    model, shape = tiny_nets()["mlp"]
    x, y = torch.rand(8, *shape), torch.arange(8) % 3
    row = record(model, plain_loss, x, y, step=7, lr=0.1)
    assert list(row) == [
        *("step", "loss", "loss_low", "loss_high", "gradient_difference", "gradient_rms", "cosine_distance")
    ]
    assert row["step"] == 7
    assert row["loss"] == pytest.approx(float(plain_loss(model, x, y).detach()))
    assert row["loss_low"] < row["loss_high"] == pytest.approx(row["loss"])  # short steps go down
    more = record(model, plain_loss, x, y, step=7, lr=0.1, target=ibp_loss)
    assert {key: more[key] for key in row} == row
    found = target_alignment(model, plain_loss, ibp_loss, x, y, lr=0.1)
    assert more["target_cosine"] == found.cosine
    assert more["target_difference"] == found.difference
    assert more["target_curvature"] == found.curvature
    assert all(isinstance(value, int | float) for value in more.values())


def test_random_losses_give_the_same_row_for_the_same_seed():
    model, shape = tiny_nets()["mlp"]
    x, y = torch.rand(8, *shape), torch.arange(8) % 3

    def noisy(seed):
        shift = lambda x: 0.1 * Noise.for_batch(seed, len(x)).normal(x.shape[1:])  # noqa: E731
        return lambda model, x, y: cross_entropy(model(x + shift(x)), y)

    assert record(model, noisy(3), x, y, step=0, lr=0.1) == record(model, noisy(3), x, y, step=0, lr=0.1)
    assert record(model, noisy(3), x, y, step=0, lr=0.1) != record(model, noisy(4), x, y, step=0, lr=0.1)


def test_dropout_is_the_same_at_all_weights_and_the_training_around_keeps_its_numbers():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(20, 3)).train()
    x, y = torch.rand(4, 20), torch.arange(4) % 3
    first = gradient_change(model, plain_loss, x, y, lr=1e-6)
    expected = torch.get_rng_state()
    assert gradient_change(model, plain_loss, x, y, lr=1e-6) == first
    assert torch.equal(torch.get_rng_state(), expected)
    assert first.cosine_distance < 1e-6  # other masks would turn the gradient by far more


@pytest.mark.parametrize("fails_at", [None, 1, 3])
def test_the_model_is_left_as_it_was_even_if_the_loss_fails(fails_at):
    model, shape = tiny_nets()["cnn"]
    model.train()
    x, y = torch.rand(6, *shape), torch.arange(6) % 5
    plain_loss(model, x, y).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients, calls = [p.grad.clone() for p in model.parameters()], []

    def loss(model, x, y):
        calls.append(1)
        value = plain_loss(model, x, y)  # moves the statistics of batch norm
        if len(calls) == fails_at:
            raise RuntimeError("no")
        return value

    if fails_at is None:
        record(model, loss, x, y, step=0, lr=0.1, target=loss)
    else:
        with pytest.raises(RuntimeError, match="no"):
            record(model, loss, x, y, step=0, lr=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert model.training


def test_frozen_weights_take_no_part():
    model, shape = tiny_nets()["mlp"]
    x, y = torch.rand(4, *shape), torch.arange(4) % 3
    whole = gradient_change(model, plain_loss, x, y, lr=0.1)
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    assert len(weights(model)) == 16 * 3 + 3
    assert 0 < gradient_change(model, plain_loss, x, y, lr=0.1).difference < whole.difference
    with pytest.raises(InputError, match="no trainable"):
        weights(model.requires_grad_(False))


def test_a_vanished_gradient_has_no_direction():
    model = Point(torch.zeros(2))
    at_rest = quadratic(torch.eye(2), torch.zeros(2))
    change = gradient_change(model, at_rest, *NOTHING, lr=0.1)
    assert change.difference == 0
    assert math.isnan(change.cosine_distance)
    found = target_alignment(model, at_rest, quadratic(torch.eye(2), torch.ones(2)), *NOTHING, lr=0.1)
    assert math.isnan(found.cosine)
    assert math.isnan(found.curvature)


def test_a_loss_that_explodes_shows_as_nan():
    model = Point(torch.ones(1))
    wild = lambda m, x, y: (m.theta**2).sum() + torch.where(m.theta[0] < 0, torch.nan, 0.0)  # noqa: E731
    variation = loss_variation(model, wild, *NOTHING, lr=0.2)
    assert variation.values[0] == 1
    assert math.isnan(variation.low)
    assert math.isnan(variation.high)


def test_what_cannot_be_measured():
    model, shape = tiny_nets()["mlp"]
    x, y = torch.rand(4, *shape), torch.arange(4) % 3
    for lr in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="lr must be positive"):
            gradient_change(model, plain_loss, x, y, lr=lr)
    with pytest.raises(InputError, match="at least one number"):
        loss_variation(model, plain_loss, x, y, lr=0.1, factors=())
    with pytest.raises(InputError, match=r"scalar, got shape \(4,\)"):
        gradient_change(model, lambda m, x, y: m(x).sum(1), x, y, lr=0.1)
    for stranger in (lambda m, x, y: plain_loss(model, x, y), lambda m, x, y: x.sum()):
        with pytest.raises(InputError, match="does not depend on the model"):
            gradient_change(model, stranger, x, y, lr=0.1)
    with pytest.raises(InputError, match=r"shape \(435,\).*got \(3,\)"):
        gradient_change_between(model, plain_loss, x, y, torch.zeros(3), torch.zeros(3))
