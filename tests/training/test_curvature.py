"""The trace over all layers against the Hessian that automatic differentiation gives."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, jacrev
from torch.nn.functional import cross_entropy

from holdfast.errors import InputError, UnsupportedError
from holdfast.models import Normalize
from holdfast.random import Noise
from holdfast.training.curvature import (
    eigenvalue_spread,
    layer_bound,
    trace_hutchinson,
    trace_relu,
    trace_relu_layers,
)
from holdfast.training.outputs import Output
from holdfast.training.top_curvature import trace_ce


def relu_net(bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(4, 7, bias=bias),
        nn.ReLU(),
        nn.Sequential(nn.Linear(7, 6, bias=bias), nn.ReLU()),
        nn.Linear(6, 3, bias=bias),
    ).double()


def whole_hessian(model, x, y):
    """Traces of the blocks on the diagonal, by name of the parameter, by differentiating twice."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    blocks = jacrev(grad(lambda p: cross_entropy(functional_call(model, p, (x,)), y)))(parameters)
    return {n: blocks[n][n].reshape(p.numel(), p.numel()).trace() for n, p in parameters.items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_trace_of_a_relu_network(bias, seed):
    model = relu_net(bias, seed)
    x, y = torch.randn(3, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 2])
    layers = trace_relu_layers(model, x)
    assert layers.shape == (3, 3)
    for i in range(3):
        blocks = whole_hessian(model, x[i : i + 1], y[i : i + 1])
        for layer, name in enumerate(("1", "3.0", "4")):
            truth = sum(v for n, v in blocks.items() if n.startswith(name))
            assert layers[layer, i].item() == pytest.approx(truth.item(), rel=1e-10, abs=1e-12)
        assert trace_relu(model, x)[i].item() == pytest.approx(sum(blocks.values()).item(), rel=1e-10)
    features = model[:4](x)
    torch.testing.assert_close(layers[-1], trace_ce(Output(model(x), features), bias=bias))
    assert trace_relu(model, x[:0]).shape == (0,)


def test_trace_of_a_network_that_ends_in_a_relu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.ReLU()).double()
    x = torch.randn(1, 3, dtype=torch.float64)
    truth = sum(whole_hessian(model, x, torch.tensor([1])).values())
    assert trace_relu(model, x).item() == pytest.approx(truth.item(), rel=1e-10)


def test_the_printed_trace_of_lower_layers_is_another_number():
    """It leaves out the terms s_k s_l J_k J_l between classes. Twice the printed number bounds the true one."""
    differs = False
    for seed in range(5):
        model = relu_net(seed=seed)
        x = torch.randn(4, 4, dtype=torch.float64)
        exact_layers = trace_relu_layers(model, x)
        s = model(x).softmax(1)
        hidden = model[:3](x)
        active = model[3][0](hidden) > 0
        slope = (model[4].weight * active[:, None]).square()  # (B, K, 6)
        printed = (hidden.square().sum(1) + 1) * (slope * (s - s.square())[:, :, None]).sum((1, 2))
        assert bool((exact_layers[1] <= 2 * printed * (1 + 1e-12)).all())
        differs |= bool(((exact_layers[1] / printed - 1).abs() > 0.1).any())
    assert differs


def test_gradient_of_the_relu_trace():
    model = relu_net()
    x = torch.randn(3, 4, dtype=torch.float64)
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(trace_relu(model, x).mean(), parameters)
    assert all(bool((g != 0).any()) for g in gradient)
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum((g * v).sum() for g, v in zip(gradient, direction, strict=True)).item()
    ends = []
    for step in (1e-6, -1e-6):
        moved = {n: p + step * v for (n, p), v in zip(model.named_parameters(), direction, strict=True)}
        ends.append(trace_relu(model, x, weights=moved).mean().item())
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)
    assert ends[0] != trace_relu(model, x).mean().item()


def test_a_single_layer_is_its_own_top_layer():
    model, x = nn.Linear(4, 3).double(), torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(trace_relu(model, x), trace_ce(Output(model(x), x), bias=True))


def test_normalisation_may_come_first():
    torch.manual_seed(0)
    inner = relu_net()
    model = nn.Sequential(Normalize(0.3, 0.5), inner).double()
    x = torch.rand(3, 4, dtype=torch.float64)
    torch.testing.assert_close(trace_relu_layers(model, x), trace_relu_layers(inner, (x - 0.3) / 0.5))
    with pytest.raises(UnsupportedError, match="'1' is Normalize"):
        trace_relu(nn.Sequential(nn.Linear(4, 4), Normalize(0.3, 0.5), nn.Linear(4, 2)), x)


def test_networks_without_an_exact_trace():
    x = torch.zeros(1, 4)
    with pytest.raises(UnsupportedError, match=r"'1' is Tanh\(\)"):
        trace_relu(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 2)), x)
    with pytest.raises(UnsupportedError, match="'the model' is Bilinear"):
        trace_relu(nn.Bilinear(2, 2, 2), x)
    tied = nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match="'2' shares its weight"):
        trace_relu(nn.Sequential(tied, nn.ReLU(), tied), x)
    with pytest.raises(UnsupportedError, match="no linear layer"):
        trace_relu(nn.Sequential(nn.ReLU()), x)
    with pytest.raises(InputError, match=r"'0' sees shape \(1, 2, 4\)"):
        trace_relu(nn.Sequential(nn.Linear(4, 2)), torch.zeros(1, 2, 4))


@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 5))
def test_each_layer_bounds_the_one_below(seed, scale):
    model = relu_net(seed=seed)
    x = torch.randn(4, 4, dtype=torch.float64) * scale
    found = layer_bound(model, x)
    assert found.largest.shape == found.limit.shape == (3, 4)
    assert bool((found.largest <= found.limit * (1 + 1e-12)).all())
    assert bool((found.largest[-1] > 0).all())


def test_the_bound_of_layers_by_hand():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 3.0], [2.0, 0.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.5]]))
    x = torch.zeros(1, 2, dtype=torch.float64) + torch.tensor([1.0, 1.0])
    s = model(x).softmax(1)[0, 0].item()  # inputs 4 and 2 of the top layer, logits 4 and -3
    h = s * (1 - s)
    found = layer_bound(model, x)
    assert found.largest[:, 0].tolist() == pytest.approx([9 * h, h])
    assert found.limit[:, 0].tolist() == pytest.approx([h * 9, h * 4])


def dense_problem():
    """A small network without a closed form, and its Hessian."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 3
    names = dict(model.named_parameters())

    def loss(parameters):
        return cross_entropy(functional_call(model, parameters, (x,)), y)

    def of(flat):
        parts = flat.split([p.numel() for p in names.values()])
        return loss({n: part.view_as(p) for (n, p), part in zip(names.items(), parts, strict=True)})

    flat = torch.cat([p.detach().flatten() for p in names.values()])
    return (model, x, y), loss, names, jacrev(grad(of))(flat)


def test_hutchinson_is_unbiased():
    _, loss, parameters, hessian = dense_problem()
    samples = 400
    found = trace_hutchinson(loss, parameters, noise=Noise.for_batch(0, 1), samples=samples)
    variance = 2 * (hessian.square().sum() - hessian.diagonal().square().sum()) / samples
    assert not found.requires_grad
    assert abs(found - hessian.trace()) < 3 * variance.sqrt()
    assert variance.sqrt() < 0.2 * hessian.trace()
    few, again, other = (
        trace_hutchinson(loss, parameters, noise=Noise.for_batch(seed, 1), samples=20) for seed in (0, 0, 1)
    )
    assert few.item() == again.item() != other.item()


def test_hutchinson_of_a_diagonal_hessian_is_exact_and_differentiable():
    p = {"a": torch.tensor([1.0, 2.0], requires_grad=True), "b": torch.tensor(3.0, requires_grad=True)}

    def loss(at):
        return (at["a"] ** 3).sum() + at["b"] ** 4

    trace = trace_hutchinson(loss, p, noise=Noise.for_batch(0, 1), samples=2, create_graph=True)
    assert trace.item() == pytest.approx(6 * 3 + 12 * 9)
    trace.backward()
    assert p["a"].grad.tolist() == pytest.approx([6.0, 6.0])
    assert p["b"].grad.item() == pytest.approx(72.0)
    with pytest.raises(InputError, match="samples"):
        trace_hutchinson(loss, p, noise=Noise.for_batch(0, 1), samples=0)


def test_spread_of_the_eigenvalues():
    task, _, _, hessian = dense_problem()
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert eigenvalue_spread(*task).item() == pytest.approx(eigenvalues.std(correction=0).item(), rel=1e-10)
    assert eigenvalues.sum().item() == pytest.approx(hessian.trace().item())


def test_the_model_is_left_alone():
    model = relu_net()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 4, dtype=torch.float64)
    trace_relu(model, x)
    layer_bound(model, x)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
