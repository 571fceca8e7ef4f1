"""Curves between networks: exact ends, gradients by the chain rule, no barrier where there can be none."""

import copy

import pytest
import torch
from nets import settle, tiny_nets
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parameters_to_vector

import holdfast as hf
from holdfast.analyze.connectivity import TS, barrier, bernstein, connect, path_losses, point_gradients, segment
from holdfast.errors import InputError
from holdfast.training.objectives.core.certified import certified_loss


def loss(model, x, y):
    return cross_entropy(model(x), y)


def accuracy(model, x, y):
    return (model(x).argmax(1) == y).float().mean()


def pair(name="mlp"):
    """Two networks of one architecture, and data for them."""
    one, shape = tiny_nets()[name]
    other = copy.deepcopy(one)
    torch.manual_seed(5)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.rand(24, *shape)
    return one, other, x, torch.arange(24) % one(x).shape[1]


def vector(model):
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("bends", [1, 3])
def test_the_ends_are_the_networks_themselves(bends):
    one, other, x, y = pair()
    for curve in (
        segment(one, other, bends=bends),
        connect(one, other, loss, x, y, steps=3, lr=0.1, batch_size=4, bends=bends),
    ):
        assert curve.points.shape == (bends + 2, len(vector(one)))
        for t, model in ((0, one), (1, other)):
            assert torch.equal(curve.weights(t), vector(model))
            assert torch.equal(curve.at(t)(x), model(x))
    assert not torch.equal(curve.weights(0.5), segment(one, other).weights(0.5))


@pytest.mark.parametrize("bends", [1, 2, 3])
@pytest.mark.parametrize("t", [0.0, 0.1, 0.5, 0.99, 1.0])
def test_points_on_the_segment_give_the_segment(bends, t):
    one, other, *_ = pair()
    straight = (1 - t) * vector(one) + t * vector(other)
    assert torch.allclose(segment(one, other, bends=bends).weights(t), straight, atol=1e-6)


def test_the_basis():
    for t in (0.0, 0.3, 1.0):
        assert float(bernstein(t, 4).sum()) == pytest.approx(1.0)
        assert bernstein(t, 2).tolist() == pytest.approx([(1 - t) ** 2, 2 * t * (1 - t), t**2])
    for t in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match=r"\[0, 1\]"):
            bernstein(t, 2)


@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 1.0])
def test_the_gradient_of_the_bend_is_that_of_the_loss_times_2t_1_minus_t(t):
    one, other, x, y = pair()
    curve = segment(one, other)
    bend = curve.points[1].clone().requires_grad_(True)
    phi = (1 - t) ** 2 * vector(one) + 2 * t * (1 - t) * bend + t**2 * vector(other)
    named, parts = dict(one.named_parameters()), {}
    for (name, p), part in zip(named.items(), phi.split([p.numel() for p in named.values()]), strict=True):
        parts[name] = part.view_as(p)
    (exact,) = torch.autograd.grad(cross_entropy(functional_call(one, parts, (x,)), y), bend)
    found = point_gradients(curve, loss, x, y, t)
    assert torch.allclose(found[1], exact, atol=1e-6)
    direct = curve.at(t)
    g = parameters_to_vector(torch.autograd.grad(loss(direct, x, y), direct.parameters()))
    assert torch.allclose(found, torch.tensor([(1 - t) ** 2, 2 * t * (1 - t), t**2])[:, None] * g, atol=1e-6)


def test_a_convex_loss_has_no_barrier():
    torch.manual_seed(0)
    x, y = torch.rand(50, 3), torch.rand(50, 1)
    one, other = nn.Linear(3, 1), nn.Linear(3, 1)
    squares = {"loss": lambda model, x, y: mse_loss(model(x), y)}
    straight = path_losses(segment(one, other), squares, x, y)["loss"]
    assert barrier(straight) == 0
    bent = path_losses(connect(one, other, squares["loss"], x, y, steps=100, lr=0.03), squares, x, y)["loss"]
    assert barrier(bent) == 0
    assert float(bent.mean()) < float(straight.mean()) * 0.9


class Point(nn.Module):
    def __init__(self, *theta):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta))


def test_a_curve_leads_around_a_hill():
    nothing = torch.zeros(1, 1), torch.zeros(1)
    hill = {"hill": lambda m, x, y: torch.exp(-3 * (m.theta - torch.tensor([0.0, -0.1])).square().sum())}
    one, other = Point(-1.0, 0.0), Point(1.0, 0.0)
    straight = path_losses(segment(one, other), hill, *nothing)["hill"]
    assert barrier(straight) > 0.8
    curve = connect(one, other, hill["hill"], *nothing, steps=200, lr=0.05, batch_size=1)
    assert barrier(path_losses(curve, hill, *nothing)["hill"]) < 0.05


def test_certified_losses_and_other_measures_along_the_path():
    one, other, x, y = pair()

    def certified(model, x, y):
        return certified_loss(model, x, y, hf.Linf(0.02))[0].mean()

    curve = connect(one, other, certified, x, y, steps=2, lr=0.01, batch_size=8)
    measures = {"certified": certified, "accuracy": accuracy, "clean": loss}
    found = path_losses(curve, measures, x, y, ts=(0, 0.5, 1))
    assert list(found) == list(measures)
    for i, model in ((0, one), (2, other)):
        assert float(found["certified"][i]) == pytest.approx(float(certified(model, x, y).detach()), rel=1e-5)
        assert float(found["accuracy"][i]) == pytest.approx(float(accuracy(model, x, y)))
    assert bool((found["certified"] > found["clean"]).all())
    chunked = path_losses(curve, measures, x, y, ts=(0, 0.5, 1), chunk=7)
    assert all(torch.allclose(chunked[name], found[name], atol=1e-6) for name in found)


def test_a_loss_with_an_attack_inside():
    one, other, x, y = pair()

    def attacked(model, x, y):
        model.eval()
        return loss(model, hf.attack(model, x, y, hf.Linf(0.05), "fgsm").x_adv, y)

    curve = connect(one, other, attacked, x, y, steps=2, lr=0.01, batch_size=8)
    found = path_losses(curve, {"attacked": attacked, "clean": loss}, x, y, ts=(0, 0.5))
    assert bool((found["attacked"] > found["clean"]).all())


def test_the_seed_decides_and_the_networks_stay():
    one, other, x, y = pair("cnn")
    before = [{k: v.clone() for k, v in model.state_dict().items()} for model in (one, other)]
    options = {"steps": 3, "lr": 0.01, "batch_size": 4}
    first, again, else_ = (connect(one, other, loss, x, y, seed=seed, **options).points for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, else_)
    for model, state in zip((one, other), before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert not model.training


def test_batch_norm_gets_its_statistics_at_every_place():
    torch.manual_seed(0)
    one, other = (settle(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))) for _ in range(2))
    x, y = torch.rand(40, 4), torch.arange(40) % 2
    curve = connect(one, other, loss, x, y, steps=3, lr=0.01, batch_size=8)
    with pytest.raises(InputError, match=r"'1' is a batch norm: give x_train"):
        path_losses(curve, {"loss": loss}, x, y)
    found = path_losses(curve, {"loss": loss}, x, y, ts=(0.3,), x_train=x)["loss"]
    a, norm, b = curve.at(0.3)
    hidden = a(x)
    scaled = (hidden - hidden.mean(0)) / (hidden.var(0) + norm.eps).sqrt()
    assert float(found) == pytest.approx(
        float(cross_entropy(b(norm.weight * scaled + norm.bias), y).detach()), rel=1e-5
    )
    # Cut after 32, the last part would be a single example, which has no variance.
    path_losses(curve, {"loss": loss}, x, y, ts=(0.3,), x_train=x[:33], chunk=32)


def test_barriers():
    assert barrier(torch.tensor([1.0, 3.0, 2.0])) == 1.0
    assert barrier([2.0, 1.0, 1.5]) == 0.0
    assert barrier([0.0, 1.0]) == 0.0
    with pytest.raises(InputError, match="two places"):
        barrier([1.0])
    assert TS[0] == 0
    assert TS[-1] == 1


def test_what_cannot_be_connected():
    one, other, x, y = pair()
    with pytest.raises(InputError, match=r"one architecture: 'weight'"):
        segment(nn.Linear(2, 3), nn.Linear(2, 4))
    with pytest.raises(InputError, match=r"'bias' has shape \(3,\) in the first and None"):
        segment(nn.Linear(2, 3), nn.Linear(2, 3, bias=False))
    normalized = [hf.make_model("linear", normalize=(mean, 1.0), seed=0) for mean in (0.1, 0.2)]
    with pytest.raises(InputError, match="differs between the models"):
        segment(*normalized)
    for options in ({"steps": 0, "lr": 0.1}, {"steps": 1, "lr": 0.0}, {"steps": 1, "lr": 0.1, "batch_size": 0}):
        with pytest.raises(InputError, match="must be positive"):
            connect(one, other, loss, x, y, **options)
    with pytest.raises(InputError, match="and 0 inputs"):
        connect(one, other, loss, x[:0], y[:0], steps=1, lr=0.1)
    with pytest.raises(InputError, match="bends"):
        segment(one, other, bends=0)
    with pytest.raises(InputError, match="not finite in step 0"):
        connect(one, other, lambda m, x, y: loss(m, x, y) * torch.inf, x, y, steps=2, lr=0.1)
    with pytest.raises(InputError, match="does not depend on the model"):
        connect(one, other, lambda m, x, y: loss(one, x, y), x, y, steps=2, lr=0.1)
    with pytest.raises(InputError, match="got 0 inputs"):
        path_losses(segment(one, other), {"loss": loss}, x[:0], y[:0])
