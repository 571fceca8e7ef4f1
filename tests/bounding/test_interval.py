import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding import interval
from holdfast.bounding.core.rounding import gamma
from holdfast.bounding.fast import fused
from holdfast.bounding.graph.trace import trace
from holdfast.errors import HoldfastError, UnsupportedError


@pytest.mark.parametrize("sound", [False, True])
def test_ten_thousand_points_of_the_box_stay_within_the_bounds(net, sound):
    model, shape = net
    x = torch.rand(1, *shape)
    lower, upper = hf.Linf(0.1).box(x)
    points = lower + (upper - lower) * torch.rand(10_000, *shape)
    points[:2000] = torch.where(torch.rand_like(points[:2000]) < 0.5, lower, upper)
    bounds = hf.bounds(model, x, hf.Linf(0.1), "ibp", sound=sound)
    outputs = model(points)
    slack = 0 if sound else 1e-5
    assert bool((outputs >= bounds.lower - slack).all())
    assert bool((outputs <= bounds.upper + slack).all())


def test_a_box_of_one_point_gives_the_network_itself(net):
    model, shape = net
    x = torch.rand(4, *shape, dtype=torch.float64)
    bounds = hf.bounds(model.double(), x, hf.Linf(0.0), "ibp", sound=False)
    assert torch.allclose(bounds.lower, model(x), atol=1e-9)
    assert torch.allclose(bounds.upper, model(x), atol=1e-9)
    model.float()


@given(st.integers(1, 10), st.integers(1, 4), st.floats(0.01, 1.0))
def test_one_linear_layer_is_exact(size, classes, eps):
    model = nn.Linear(size, classes).eval()
    x = torch.rand(2, size)
    bounds = hf.bounds(model, x, hf.Linf(eps), "ibp", sound=False)
    lower, upper = hf.Linf(eps).box(x)
    corners = torch.stack(
        [torch.where(torch.tensor(choice), lower, upper) for choice in itertools.product([True, False], repeat=size)]
    )
    outputs = model(corners)
    assert torch.allclose(bounds.upper, outputs.amax(0), atol=1e-5)
    assert torch.allclose(bounds.lower, outputs.amin(0), atol=1e-5)


def test_wider_boxes_give_wider_bounds(net):
    model, shape = net
    x = torch.rand(5, *shape)
    inner, outer = (hf.bounds(model, x, hf.Linf(eps), "ibp") for eps in (0.05, 0.1))
    assert bool((outer.lower <= inner.lower + 1e-6).all())
    assert bool((outer.upper >= inner.upper - 1e-6).all())


def test_merging_the_last_layer_never_loosens_a_margin(net):
    model, shape = net
    x = torch.rand(6, *shape)
    y = model(x).argmax(1)
    graph = trace(model, x)
    lower, upper = hf.Linf(0.05).box(x)
    low, high = interval.output_bounds(graph, lower, upper, sound=False)
    margins = interval.margin_bounds(graph, lower, upper, y, sound=False)
    separate = (low.gather(1, y[:, None]) - high).scatter(1, y[:, None], 0.0)
    assert bool((margins >= separate - 1e-5).all())
    assert bool((margins.gather(1, y[:, None]) == 0).all())
    # and it bounds the margin at every point
    logits = model(lower + (upper - lower) * torch.rand_like(x))
    assert bool((logits.gather(1, y[:, None]) - logits >= margins - 1e-5).all())


def test_margins_without_a_dense_last_layer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval()
    x = torch.rand(5, 4)
    y = torch.tensor([0, 1, 2, 0, 1])
    graph = trace(model, x)
    lower, upper = hf.Linf(0.1).box(x)
    margins = interval.margin_bounds(graph, lower, upper, y, sound=True)
    low, high = interval.output_bounds(graph, lower, upper, sound=True)
    assert bool((margins <= (low.gather(1, y[:, None]) - high).scatter(1, y[:, None], 0.0)).all())


def test_gradients_reach_the_parameters():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    x = torch.rand(2, 4, dtype=torch.float64)
    parameters = list(model.parameters())

    def width(*values):
        for p, v in zip(parameters, values, strict=True):
            p.data = v.detach()
        bounds = hf.bounds(model, x, hf.Linf(0.1), "ibp", sound=False)
        return (bounds.upper - bounds.lower).sum()

    gradients = torch.autograd.grad(width(*[p.data for p in parameters]), parameters, allow_unused=True)
    weight = parameters[0].data.clone()
    step = torch.zeros_like(weight)
    step[1, 2] = 1e-6
    values = [p.data for p in parameters[1:]]
    finite = (width(weight + step, *values) - width(weight - step, *values)) / 2e-6
    assert abs(gradients[0][1, 2].item() - finite.item()) < 1e-5


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown"])
def test_every_parameter_gets_a_gradient(method):
    model, shape = tiny_nets()["cnn"]
    bounds = hf.bounds(model, torch.rand(2, *shape), hf.Linf(0.1), method, sound=False)
    (bounds.upper - bounds.lower).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name != "8.bias":  # a shift of the logits does not change their width
            assert parameter.grad is not None, name
            assert bool(torch.isfinite(parameter.grad).all()), name
    assert float(model[1].weight.grad.abs().sum()) > 0


def test_sound_bounds_contain_the_unsound_ones_and_the_exact_value(net):
    model, shape = net
    x = torch.rand(3, *shape)
    plain, sound = (hf.bounds(model, x, hf.Linf(0.02), "ibp", sound=s) for s in (False, True))
    assert bool((sound.lower <= plain.lower).all())
    assert bool((sound.upper >= plain.upper).all())
    exact = hf.bounds(model.double(), x.double(), hf.Linf(0.02), "ibp", sound=False)
    model.float()
    assert bool((sound.lower <= exact.lower).all())
    assert bool((sound.upper >= exact.upper).all())
    assert bool((sound.upper - sound.lower <= (plain.upper - plain.lower) * 1.01 + 1e-3).all())


def cancelling():
    """z_0 - z_1 = (2^26 x - 1) - 2^26 x + x / 8 = -7/8 at x = 1; float32 loses the -1 whatever the order of sums."""
    big = 2.0**26
    weights = [[[big], [big], [0.125]], [[1.0, -1.0, 0.0], [0.0, 0.0, 1.0]], [[1.0, 1.0], [0.0, 0.0]]]
    biases = [[-1.0, 0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    layers = []
    for weight, bias in zip(weights, biases, strict=True):
        layer = nn.Linear(len(weight[0]), len(weight))
        layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
        layers.append(layer)
    return nn.Sequential(*layers).eval()


def test_rounding_fools_the_plain_bounds_but_not_the_sound_ones():
    model, x, y = cancelling(), torch.ones(1, 1), torch.tensor([0])
    truth = model.double()(x.double())
    model.float()
    assert truth[0, 0] - truth[0, 1] == -0.875
    assert model(x).argmax(1).item() == 0, "float32 sees the wrong class"
    assert hf.certify(model, x, y, hf.Linf(0.0), "ibp", sound=False).certified.item()
    assert not hf.certify(model, x, y, hf.Linf(0.0), "ibp", sound=True).certified.item()
    bounds = hf.bounds(model, x, hf.Linf(0.0), "ibp", sound=True)
    assert bool((bounds.lower <= truth).all())
    assert bool((bounds.upper >= truth).all())


def test_a_half_precision_network_has_no_sound_bound():
    with pytest.raises(UnsupportedError, match="float32"):
        gamma(4096, torch.float16)


def test_overflow_is_an_error_for_bounds_and_no_certificate():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(1e30)
            layer.bias.zero_()
        model[1].weight[1] = -1e30
        x = torch.zeros(1, 2)
    with pytest.raises(HoldfastError, match="overflowed"):
        hf.bounds(model, x, hf.Linf(0.5), "ibp")
    assert not hf.certify(model, x, torch.tensor([0]), hf.Linf(0.5), "ibp").certified.item()


@pytest.mark.parametrize("function", [fused.halves, fused.ends])
def test_pairs_in_few_passes_have_the_gradients_of_plain_sums(function):
    torch.manual_seed(0)
    a, b = (torch.rand(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain = {fused.halves: lambda a, b: ((a + b) / 2, (b - a) / 2), fused.ends: lambda a, b: (a - b, a + b)}[function]
    for ours, theirs in zip(function(a, b), plain(a, b), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(function, (a, b))
    assert torch.autograd.gradgradcheck(function, (a, b))


def test_margins_of_the_merged_last_layer_are_rounded_down():
    """At a point the exact margin is known: the sound bound is never above it, the other one often is."""
    model = nn.Linear(300, 5).eval()
    x = torch.rand(200, 300)
    y = model(x).argmax(1)
    exact = nn.functional.linear(x.double(), model.weight.double(), model.bias.double()).detach()
    exact = exact.gather(1, y[:, None]) - exact
    sound, plain = (interval.margin_bounds(trace(model, x), x, x, y, sound=s).detach().double() for s in (True, False))
    assert bool((sound <= exact).all())
    assert int((plain > exact).sum()) > 100
    assert float((exact - sound).max()) < 1e-3


def test_logits_of_a_point_are_rounded_outward():
    """The exact logits lie within the sound bounds of one long layer; float32 by itself misses most of them."""
    model = nn.Linear(300, 5).eval()
    x = torch.rand(200, 300)
    exact = nn.functional.linear(x.double(), model.weight.double(), model.bias.double()).detach()
    low, high = (end.detach().double() for end in interval.output_bounds(trace(model, x), x, x, sound=True))
    assert bool((low <= exact).all())
    assert bool((exact <= high).all())
    assert float((high - low).max()) < 1e-3
    assert int((model(x).double() != exact).sum()) > 500


def test_margins_of_one_linear_layer_are_exact():
    """The difference of two logits is linear: its least value is at a corner of the box."""
    model = nn.Linear(6, 4).double().eval()
    x, y = torch.rand(5, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 1])
    lower, upper = hf.Linf(0.2).box(x)
    corners = torch.stack(
        [torch.where(torch.tensor(choice), lower, upper) for choice in itertools.product([True, False], repeat=6)]
    )
    logits = model(corners)
    exact = (logits.gather(2, y.expand(len(corners), -1)[..., None]) - logits).amin(0)
    for sound in (False, True):
        margins = interval.margin_bounds(trace(model, x), lower, upper, y, sound=sound)
        assert torch.allclose(margins, exact, rtol=0, atol=1e-12)


def test_products_that_underflow_are_within_the_sound_bounds():
    """Ten products of 1e-30 and -+1e-20 are zero in float32; their exact sum is the margin, and it is negative."""
    model = nn.Linear(10, 2, bias=False).eval()
    model.weight.data = torch.full((2, 10), 1e-30) * torch.tensor([[-1.0], [1.0]])
    x, y = torch.full((1, 10), 1e-20), torch.tensor([0])
    exact = [
        sum(Fraction(w) * Fraction(v) for w, v in zip(row, x[0].tolist(), strict=True)) for row in model.weight.tolist()
    ]
    assert model(x).tolist() == [[0.0, 0.0]]
    graph = trace(model, x)
    low, high = interval.output_bounds(graph, x, x, sound=True)
    assert all(a <= z <= b for a, z, b in zip(low[0].tolist(), exact, high[0].tolist(), strict=True))
    margin = interval.margin_bounds(graph, x, x, y, sound=True)[0, 1].item()
    assert margin <= exact[0] - exact[1] < 0
    assert margin > -1e-35
