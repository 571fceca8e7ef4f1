"""The forward affine form: sound by sampling, exact where the network is affine."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.core.region import minimum, region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear.coefficients import dense
from holdfast.bounding.linear.forward import form_bounds, forward_planes, linear_part, propagate
from holdfast.errors import UnsupportedError
from holdfast.random import Noise

COVERED = ["linear", "mlp", "smooth", "cnn", "residual"]
THREATS = [hf.Linf(0.05), hf.L2(0.2), hf.L1(0.4)]


def values(planes, points, shape):
    """<g, x'> + c at the points (P, ...) of one input, (P, K)."""
    return points.flatten(1) @ dense(planes.coefficients, shape).values[0].flatten(1).T + planes.shift[0]


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_the_planes_lie_below_the_margins_at_ten_thousand_points(name, threat):
    model, shape = tiny_nets()[name]
    x = torch.rand(1, *shape)
    points = threat.random_start(x.expand(10_000, *shape), Noise.for_batch(0, 10_000))
    logits = model(points)
    for label in range(logits.shape[1]):
        planes = forward_planes(trace(model, x), region(threat, x, sound=False), torch.tensor([label]))
        margins = logits[:, label, None] - logits
        assert bool((margins >= values(planes, points, shape) - 1e-5).all())
        assert bool((planes.shift[0, label] == 0).all())
        assert bool((dense(planes.coefficients, shape).values[0, label] == 0).all())


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual"])
def test_every_node_stays_within_the_bounds_of_its_form(name, threat):
    model, shape = tiny_nets()[name]
    x = torch.rand(1, *shape)
    graph, r = trace(model, x), region(threat, x, sound=False)
    points = threat.random_start(x.expand(1000, *shape), Noise.for_batch(0, 1000))
    walked = graph.walk(points, lambda node, inputs: ops.evaluate(node.op, inputs))
    for value, form in zip(walked, propagate(graph, r), strict=True):
        low, high = form_bounds(form, r)
        assert bool((value >= low - 1e-5).all())
        assert bool((value <= high + 1e-5).all())


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_where_all_neurons_are_stable_the_planes_are_the_network(threat):
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    with torch.no_grad():
        for layer in model[:-1:2]:
            layer.bias.copy_(torch.where(torch.rand(8) < 0.5, 9.0, -9.0))
    x, y = torch.rand(4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    r = region(threat, x, sound=False)
    planes = forward_planes(trace(model, x), r, y)
    logits = model(x)
    margins = logits.gather(1, y[:, None]) - logits
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
    exact = jacobian[torch.arange(4), y][:, None] - jacobian
    assert torch.allclose(planes.coefficients.values, exact, atol=1e-9)
    assert torch.allclose((planes.coefficients.values * x[:, None]).sum(2) + planes.shift, margins, atol=1e-9)
    reach = torch.stack([threat.dual_norm(row) for row in exact.flatten(0, 1)[:, None]]).view(4, 3)
    bound = minimum(r, planes.coefficients, sound=False) + planes.shift
    assert bool((bound >= margins - threat.budget * reach - 1e-9).all())


def test_a_network_that_does_not_end_in_a_dense_layer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval()
    x = torch.rand(1, 4)
    planes = forward_planes(trace(model, x), region(hf.Linf(0.1), x, sound=False), torch.tensor([1]))
    points = hf.Linf(0.1).random_start(x.expand(5000, 4), Noise.for_batch(0, 5000))
    logits = model(points)
    assert bool((logits[:, 1, None] - logits >= values(planes, points, (4,)) - 1e-5).all())


def test_batches_and_gradients():
    model, shape = tiny_nets()["cnn"]
    x, y = torch.rand(4, *shape), torch.tensor([0, 1, 2, 3])
    graph = trace(model, x)

    def bound(part):
        r = region(hf.Linf(0.02), x[part], sound=False)
        planes = forward_planes(graph, r, y[part])
        return minimum(r, planes.coefficients, sound=False) + planes.shift

    assert torch.allclose(bound(slice(0, 4))[1:3], bound(slice(1, 3)), atol=1e-5)
    weights = [model[0].weight, model[4].weight, model[8].weight]
    for gradient in torch.autograd.grad(bound(slice(0, 4)).sum(), weights):
        assert bool(torch.isfinite(gradient).all())
        assert bool((gradient != 0).any())


def test_the_linear_part_leaves_out_the_shift(net):
    model, shape = net
    graph = trace(model, torch.rand(1, *shape))
    affine = [(n.op, graph.nodes[n.inputs[0]].shape) for n in graph.nodes if isinstance(n.op, ops.Affine)]
    assert affine
    for op, before in affine:
        v = torch.randn(3, *before)
        assert torch.allclose(linear_part(op, v), op.apply(v) - op.apply(torch.zeros_like(v)), atol=1e-5)


def test_max_pooling_is_refused_by_name():
    model, shape = tiny_nets()["pooled"]
    x = torch.rand(1, *shape)
    with pytest.raises(UnsupportedError, match=r"layer '2'.*MaxPool.*crown-ibp"):
        forward_planes(trace(model, x), region(hf.Linf(0.1), x, sound=False), torch.tensor([0]))
