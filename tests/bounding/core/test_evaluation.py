"""The rounding of a run: what one layer can do, in any order, and bounds in float64 that hold for it."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.core.evaluation import doubled, evaluation_error, own_error
from holdfast.bounding.core.region import Region, region
from holdfast.bounding.core.rounding import below, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.certificates.core.margins import decided_margins, linear_margins

U = unit(torch.float32)


def error_of(weight, bias, lower, upper):
    """The error of one output with these weights over a box."""
    bias = None if bias is None else torch.tensor([bias], dtype=torch.float64)
    node = ops.Node(ops.Linear(torch.tensor([weight], dtype=torch.float64), bias), (0,), "layer", (1,))
    box = tuple(torch.tensor([end], dtype=torch.float64) for end in (lower, upper))
    return own_error(node, [box], box, torch.float32).item()


def test_the_error_of_a_layer_is_the_formula_over_all_partial_sums_and_corners():
    weight, bias = [0.5, -1.25, 2.0, 0.0, 0.75], -0.375
    lower, upper = [-1.0, 0.25, 0.0, 1.0, 0.0], [0.5, 1.0, 2.0, 3.0, 0.0]
    largest = total = 0.0
    for corner in itertools.product(*zip(lower, upper, strict=True)):
        products = [w * v for w, v in zip(weight, corner, strict=True)] + [bias]
        for n in range(len(products) + 1):
            for some in itertools.combinations(products, n):
                largest = max(largest, abs(sum(some)))
    reach = [max(v, 0) + max(-v0, 0) for v0, v in zip(lower, upper, strict=True)]
    total = sum(abs(w) * r for w, r in zip(weight, reach, strict=True)) + abs(bias)
    terms = 4  # three products that can differ from zero, and the bias: neither the weight 0 nor the input 0 counts
    wanted = (terms - 1) * U / (1 - (terms - 1) * U) * (1 + U) * largest + U * total
    assert error_of(weight, bias, lower, upper) == pytest.approx(wanted, rel=1e-5)
    assert error_of(weight, bias, lower, upper) >= wanted


def test_no_order_of_summation_exceeds_it():
    """Sums in float32, one by one and in blocks, in orders that make the partial sums large."""
    noise = np.random.default_rng(0)
    largest = 0.0
    for trial in range(200):
        n = int(noise.integers(2, 60))
        w, v = noise.standard_normal(n).astype(np.float32), noise.random(n).astype(np.float32)
        products = w * v  # rounded to float32
        orders = [np.arange(n), np.argsort(products), np.argsort(-products), np.argsort(-np.abs(products))]
        exact = float(w.astype(np.float64) @ v.astype(np.float64))
        bound = error_of(w.tolist(), None, v.tolist(), v.tolist())
        for order in orders:
            one_by_one = products[order].cumsum(dtype=np.float32)[-1]
            blocks = np.float32(0)
            for k in range(0, n, 7):
                blocks = blocks + products[order][k : k + 7].cumsum(dtype=np.float32)[-1]
            for found in (one_by_one, blocks):
                assert abs(float(found) - exact) <= bound, trial
                largest = max(largest, abs(float(found) - exact) / bound)
    assert largest > 0.2  # some come close


def test_selections_are_exact_and_values_that_overflow_have_no_bound():
    box = (torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[1.0]], dtype=torch.float64))
    assert own_error(ops.Node(ops.Activation("relu", torch.relu), (0,), "", (1,)), [box], box, torch.float32) is None
    assert error_of([1e38, 1e38, -2e38], None, [1.0] * 3, [1.0] * 3) == torch.inf
    assert error_of([1.0], None, [0.0], [0.0]) < 1e-35


def test_a_sum_of_two_nodes_is_off_by_its_own_rounding():
    torch.manual_seed(0)
    a, b = torch.randn(1, 1000), torch.randn(1, 1000)
    boxes = [(v.double(), v.double()) for v in (a, b, a.double() + b.double())]
    error = own_error(ops.Node(ops.Add(), (0, 1), "", (1000,)), boxes[:2], boxes[2], torch.float32)
    off = ((a + b).double() - boxes[2][0]).abs()
    assert bool((off <= error).all())
    assert float((off / error).max()) > 0.2


def test_weights_that_were_computed_anew_in_float64_cost_their_own_rounding():
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(30, 2)).eval()
    model, x = nn.Sequential(layer), torch.rand(4, 30)
    with torch.no_grad():
        graph = trace(copy.deepcopy(model).double(), x.double())
        anew, kept = (
            evaluation_error(g, [(v, v) for v in (x.double(), g.forward(x.double()))], torch.float32)
            for g in (graph, doubled(trace(model, x)))
        )
        assert bool((anew > 2 * kept).all())
        assert bool(((model(x).double() - graph.forward(x.double())).abs() <= anew).all())
        assert bool(((model(x).double() - doubled(trace(model, x)).forward(x.double())).abs() <= kept).all())


@pytest.mark.parametrize("name", sorted(tiny_nets()))
@pytest.mark.parametrize("hidden", [True, False])
@torch.no_grad()
def test_bounds_in_float64_hold_for_the_run_at_little_cost(name, hidden):
    model, shape = tiny_nets()[name]
    model = model.requires_grad_(False)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(2))
    y, graph = model(x).argmax(1), trace(model, x)
    box = region(hf.Linf(0.03), x, sound=True)
    options = {"slopes": "adaptive", "hidden": hidden, "sound": True}
    first = linear.margin_bounds(linear.relaxation(graph, box, **options), y).double()
    exact = linear.margin_bounds(linear.relaxation(doubled(graph), box.double(), **options), y)
    r = linear.relaxation(doubled(graph), box.double(), **options, runs_in=torch.float32)
    run = linear.margin_bounds(r, y)
    other = torch.ones_like(run, dtype=torch.bool).scatter(1, y[:, None], False)
    assert bool((run < exact)[other].all())
    assert bool((run > first)[other].all())
    assert float((exact - run)[other].mean()) < 0.2 * float((exact - first)[other].mean())
    torch.manual_seed(0)
    for _ in range(50):
        point = box.lower + (box.upper - box.lower) * torch.rand_like(x)
        values = graph.walk(point, lambda node, given: ops.evaluate(node.op, given))
        for (low, high), value in zip(r.intervals, values, strict=True):
            assert bool(((low <= value) & (value <= high)).all())
        z = model(point).double()
        assert bool((z.gather(1, y[:, None]) - z >= run).all())


@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "smooth"])
@torch.no_grad()
def test_around_a_single_point_the_bounds_hold_what_is_computed_there(name):
    """The box has no width of its own that could hide a rounding error."""
    model, shape = tiny_nets()[name]
    graph, x = trace(model, torch.rand(1, *shape)), torch.rand(64, *shape, generator=torch.Generator().manual_seed(0))
    box = Region(x, x, x).double()
    values = graph.walk(x, lambda node, given: ops.evaluate(node.op, given))
    for hidden in (False, True):
        r = linear.relaxation(doubled(graph), box, slopes="adaptive", hidden=hidden, sound=True, runs_in=torch.float32)
        for (low, high), value in zip(r.intervals, values, strict=True):
            assert bool(((low <= value) & (value <= high)).all())


@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "smooth", "pooled"])
def test_no_errors_of_the_allowed_size_take_a_margin_below_its_bound(name):
    """Every node gets the error that it may make, with the sign that lowers the margin most to first order."""
    model, shape = tiny_nets()[name]
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    with torch.no_grad():
        graph = doubled(trace(model, x))
        box = Region(x, x, x).double()
        r = linear.relaxation(graph, box, slopes="adaptive", hidden=True, sound=True, runs_in=torch.float32)
        bound = linear.margin_bounds(r, y)
        own = [torch.zeros_like(box.x)]
        for node, output in zip(graph.nodes[1:], r.intervals[1:], strict=True):
            error = own_error(node, [r.intervals[k] for k in node.inputs], output, torch.float32)
            # A little less: the boxes here are already widened by the errors.
            own.append(torch.zeros_like(output[0]) if error is None else error * (1 - 1e-5))
    for j in range(bound.shape[1]):
        errors = [torch.zeros_like(one, requires_grad=True) for one in own]

        def margin(given, j=j):
            count = iter(range(1, len(own)))
            values = graph.walk(box.x, lambda node, v: ops.evaluate(node.op, v) + given[next(count)])
            return values[-1].gather(1, y[:, None])[:, 0] - values[-1][:, j]

        clean = margin(errors)
        slopes = torch.autograd.grad(clean.sum(), errors, allow_unused=True, materialize_grads=True)
        moved = margin([-one * slope.sign() for one, slope in zip(own, slopes, strict=True)]).detach()
        assert bool((bound[:, j] <= moved).all())
        if j != int(y[0]):
            assert float((clean.detach() - moved)[0]) > 0.1 * float((clean.detach() - bound[:, j])[0])


@torch.no_grad()
def test_the_bound_of_a_pass_covers_the_largest_errors_that_layers_may_make():
    """An affine network with the errors of each layer added against the margin, as large as they may be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)).requires_grad_(False)
    x = torch.rand(1, 6)
    y, graph = model(x).argmax(1), doubled(trace(model, x))
    box = region(hf.Linf(0.01), x, sound=True).double()
    r = linear.relaxation(graph, box, slopes="adaptive", hidden=True, sound=True, runs_in=torch.float32)
    other = 0 if int(y[0]) else 1
    row = torch.zeros(3, dtype=torch.float64)
    row[int(y[0])], row[other] = 1.0, -1.0
    weights = [layer.weight.double() for layer in model]
    slope = [row, row @ weights[2], row @ weights[2] @ weights[1]]
    lost = 0.0
    for i, back in zip((3, 2, 1), slope, strict=True):
        given = r.intervals[graph.nodes[i].inputs[0]]
        lost += float((back.abs() * own_error(graph.nodes[i], [given], r.intervals[i], torch.float32)[0]).sum())
    ends = (slope[2] @ weights[0]).clamp(min=0), (slope[2] @ weights[0]).clamp(max=0)
    at_zero = graph.forward(torch.zeros_like(box.x))[0] @ row
    true = float(ends[0] @ box.lower[0] + ends[1] @ box.upper[0] + at_zero)
    found = float(linear.margin_bounds(r, y)[0, other])
    assert found <= true - lost
    assert found == pytest.approx(true - lost, abs=1e-12)


@torch.no_grad()
def test_a_second_look_proves_what_rounding_hid_and_nothing_else():
    model, shape = tiny_nets()["cnn"]
    model = model.requires_grad_(False)
    x = torch.rand(6, *shape, generator=torch.Generator().manual_seed(3))
    y, graph = model(x).argmax(1), trace(model, x)
    box, options = region(hf.Linf(0.02), x, sound=True), {"slopes": "adaptive", "hidden": True, "sound": True}
    exact = linear_margins(doubled(graph), box.double(), y, **options).scatter(1, y[:, None], torch.inf)
    first = linear_margins(graph, box, y, **options).scatter(1, y[:, None], torch.inf)
    # Move each logit of the label such that the margin in real arithmetic is a third of what rounding takes.
    gap = exact.amin(1) - first.double().amin(1)
    proved = []
    for i in range(len(x)):
        moved = copy.deepcopy(model)
        moved[-1].bias[y[i]] -= float(exact.amin(1)[i] - gap[i] / 3)
        one = trace(moved, x[i : i + 1]), box.select(torch.tensor([i])), y[i : i + 1]
        before = linear_margins(*one, **options).scatter(1, y[i : i + 1, None], torch.inf).amin()
        after = decided_margins(*one, **options).scatter(1, y[i : i + 1, None], torch.inf).amin()
        best = linear_margins(doubled(one[0]), one[1].double(), one[2], **options)
        assert float(before) < 0 < float(after)
        assert float(after) < float(best.scatter(1, y[i : i + 1, None], torch.inf).amin())
        proved.append(bool(after > 0))
    assert proved
    off = replace(box, lower=box.lower - 1, upper=box.upper + 1)  # hopeless: no second look
    for hidden in (True, False):
        cheap = {**options, "hidden": hidden}
        found, before = decided_margins(graph, off, y, **cheap), linear_margins(graph, off, y, **cheap)
        assert bool((found >= before).all())
        assert torch.equal(found, before) == (not hidden)  # only the last pass of CROWN is done in float64 anyway


def test_a_bound_in_float32_is_never_above_the_one_in_float64():
    values = torch.randn(10000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert bool((below(values, torch.float32).double() < values).all())
    assert bool((below(values, torch.float32).double() > values - 1e-6 * values.abs()).all())
    assert below(torch.zeros(1, dtype=torch.float64), torch.float32).item() == 0.0
