"""Balls and boxes together: the solver against the optimum, the sets against samples, the bound against its parts."""

import math
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from scipy.optimize import minimize
from torch import nn

import holdfast as hf
from holdfast.bounding import interval
from holdfast.bounding.ball_box.margin import (
    estimated_norm,
    largest_drop,
    margins,
    outer_bound,
    proven_norm,
    translations,
)
from holdfast.bounding.ball_box.sets import Propagation, input_radius
from holdfast.bounding.core.region import Region, region
from holdfast.bounding.core.rounding import gamma
from holdfast.bounding.graph.ops import evaluate
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.errors import UnsupportedError
from holdfast.models.layers import MinMax
from holdfast.random import Noise

THREATS = [hf.L2(0.2), hf.Linf(0.05), hf.L1(0.3)]


def instance(seed, n=6, rows=4, count=3):
    """Random problems: rooms of zero, coefficients of zero and radii of very different size among them."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    c = (2 * draw(count, rows, n) - 1) * (draw(count, rows, n) > 0.2)
    z = draw(count, n) - 0.5
    lower, upper = (
        z - draw(count, n) * (draw(count, n) > 0.1) - 1e-3 * (draw(count, n) > 0.5),
        z + draw(count, n) * (draw(count, n) > 0.1),
    )
    return c, z, lower, upper, 10 ** (2 * draw(count) - 1.5)


def by_bisection(c, z, lower, upper, rho):
    """The optimum by the conditions of Karush, Kuhn and Tucker: p(a) = clip(z - a c), |p(a) - z| = rho."""
    lo, hi = torch.zeros(c.shape[:2], dtype=torch.float64), torch.full(c.shape[:2], 1e9, dtype=torch.float64)
    z, lower, upper, reach = z[:, None], lower[:, None], upper[:, None], rho[:, None]

    def point(a):
        return torch.maximum(torch.minimum(z - a[..., None] * c, upper), lower)

    for _ in range(200):
        a = (lo + hi) / 2
        outside = (point(a) - z).norm(dim=2) > reach
        lo, hi = torch.where(outside, lo, a), torch.where(outside, a, hi)
    return (c * (z - point(lo))).sum(2)


def test_the_golden_value():
    c, box = torch.ones(1, 1, 2, dtype=torch.float64), torch.tensor([[0.3, 2.0]], dtype=torch.float64)
    z, rho = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    assert largest_drop(c, z, -box, box, rho).item() == pytest.approx(1.253939, abs=1e-6)
    assert largest_drop(c, z, -9 + 0 * box, 9 + 0 * box, rho).item() == pytest.approx(math.sqrt(2))
    assert largest_drop(c, z, -box, box, 9 * rho).item() == pytest.approx(2.3)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_solver_is_exact(seed):
    problem = instance(seed)
    assert torch.allclose(largest_drop(*problem), by_bisection(*problem), rtol=1e-7, atol=1e-9)


def test_the_solver_agrees_with_sequential_quadratic_programming():
    c, z, lower, upper, rho = instance(3, n=4, rows=2, count=4)
    found = largest_drop(c, z, lower, upper, rho)
    for i in range(4):
        for j in range(2):
            inside = {"type": "ineq", "fun": lambda p: float(rho[i] ** 2 - ((p - z[i].numpy()) ** 2).sum())}
            limits = list(zip(lower[i].tolist(), upper[i].tolist(), strict=True))
            best = minimize(lambda p: float(c[i, j].numpy() @ p), z[i].numpy(), bounds=limits, constraints=inside)
            assert found[i, j].item() == pytest.approx(float(c[i, j] @ z[i]) - best.fun, rel=1e-4, abs=1e-5)


def test_the_ball_is_scaled_about_its_centre_and_not_about_zero():
    """As printed, the step multiplies p itself by eta: most results are then wrong."""
    wrong = 0
    for seed in range(40):
        c, z, lower, upper, rho = instance(seed, rows=1)
        p, moved = z - rho[:, None] * torch.nn.functional.normalize(c[:, 0], dim=1), torch.zeros_like(z).bool()
        for _ in range(z.shape[1]):
            moved |= (p <= lower) | (p >= upper)
            p = torch.where(moved, p.clamp(lower, upper), p)
            left = (rho.square() - ((p - z) * moved).square().sum(1)).clamp(min=0).sqrt()
            eta = left / ((p - z) * ~moved).norm(dim=1).clamp(min=1e-30)
            p = torch.where(moved, p, eta[:, None].clamp(max=1e3) * p)
        printed = (c[:, 0] * (z - p)).sum(1)
        exact = by_bisection(c, z, lower, upper, rho)[:, 0]
        wrong += int(((printed - exact).abs() > 1e-6).sum())
        assert torch.allclose(largest_drop(c, z, lower, upper, rho)[:, 0], exact, rtol=1e-7, atol=1e-9)
    assert wrong > 60


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_early_stopping_is_sound_and_falls_to_the_optimum(seed):
    problem = instance(seed, n=12)
    history = [largest_drop(*problem, steps=steps) for steps in (0, 1, 2, 3, 12)]
    ball = problem[4][:, None] * problem[0].norm(dim=2)
    assert bool((history[0] <= ball * (1 + 1e-9) + 1e-12).all())
    for before, after in pairwise(history):
        assert bool((after <= before + 1e-9).all())
    assert torch.allclose(history[-1], largest_drop(*problem))
    exact = by_bisection(*problem)
    assert all(bool((value >= exact - 1e-9).all()) for value in history)


def test_single_precision_is_close():
    for seed in range(20):
        problem = instance(seed, n=200)
        single = largest_drop(*(part.float() for part in problem))
        assert torch.allclose(single.double(), largest_drop(*problem), rtol=1e-4, atol=1e-5)


def test_the_solver_survives_degenerate_problems():
    c, z = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]]), torch.zeros(1, 2)
    box, rho = torch.ones(1, 2), torch.ones(1)
    assert largest_drop(c, z, -box, box, 0 * rho).tolist() == [[0, pytest.approx(0, abs=1e-15)]]
    for scale in (1e-3, 10, 1e5):
        still = largest_drop(scale * c, z, -box, box, 0 * rho)
        assert still.tolist() == [[0, pytest.approx(0, abs=1e-14 * scale)]]
        assert largest_drop(scale * c, z, -box, box, 1e-12 * rho)[0, 1].item() == pytest.approx(1e-12 * scale, rel=1e-3)
    assert largest_drop(c, z, 0 * box, 0 * box, rho).tolist() == [[0, 0]]
    assert largest_drop(c, z, -box, box, rho).tolist() == [[0, 1]]
    assert largest_drop(c[:0], z[:0], box[:0], box[:0], rho[:0]).shape == (0, 2)


def test_the_gradient_is_that_of_the_optimum():
    problem = [part.requires_grad_() for part in instance(11, n=5, rows=2, count=2)]
    assert torch.autograd.gradcheck(lambda *p: largest_drop(*p), problem, eps=1e-7, atol=1e-5)


def pieces(net, shape, threat, sound, count=4):
    torch.manual_seed(0)
    x = torch.rand(count, *shape)
    graph, r = trace(net, x), region(threat, x, sound=sound)
    return x, graph, r


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", tiny_nets())
def test_samples_lie_in_the_ball_and_the_box_of_every_layer(name, threat, sound):
    net, shape = tiny_nets()[name]
    x, graph, r = pieces(net, shape, threat, sound)
    with torch.no_grad():
        walk = Propagation(graph, r, proven_norm(), sound=sound)
        slack = 0.0 if sound else 1e-5
        boxes = interval.propagate(graph, r.lower, r.upper, sound=sound)
        for i in range(25):
            points = threat.random_start(x, Noise.for_batch(i, len(x)))
            points = threat.project(x + 100 * (points - x), x) if i % 2 else points
            values = graph.walk(points, lambda node, inputs: evaluate(node.op, inputs))
            for index, (value, at) in enumerate(zip(walk.values, values, strict=True)):
                assert bool((value.lower - slack <= at).all())
                assert bool((at <= value.upper + slack).all())
                distance = (at.double() - value.centre.double()).flatten(1).norm(dim=1)
                assert bool((distance <= walk.ball(index) + slack).all())
        for value, (lower, upper) in zip(walk.values, boxes, strict=True):  # the box is never larger than by intervals
            assert bool((value.lower >= lower - 1e-6).all())
            assert bool((value.upper <= upper + 1e-6).all())
            assert bool((value.lower <= value.centre).all())
            assert bool((value.centre <= value.upper).all())


@pytest.mark.parametrize("threat", [hf.L2(0.2), hf.Linf(0.05)], ids=str)
@pytest.mark.parametrize("name", tiny_nets())
def test_the_margins_are_above_those_of_the_lipschitz_bound_and_of_intervals(name, threat):
    net, shape = tiny_nets()[name]
    x, graph, r = pieces(net, shape, threat, False, count=16)
    y = net(x).argmax(1)
    with torch.no_grad():
        found = margins(outer_bound(graph, r, proven_norm(), sound=False), y)
        gaps = net(x).gather(1, y[:, None]) - net(x)
        radius = input_radius(r, sound=False)
        plain = gaps - radius[:, None] * lipschitz_bound(graph).pairs[y].to(gaps)
        by_intervals = interval.margin_bounds(graph, r.lower, r.upper, y, sound=False)
    assert bool((found >= plain - 1e-5).all())
    assert bool((found >= by_intervals - 1e-5).all())
    assert bool((found <= gaps + 1e-6).all())


class LinearBlock(nn.Module):
    def __init__(self, n, sign=1.0):
        super().__init__()
        self.inner, self.sign = nn.Linear(n, n), sign

    def forward(self, x):
        return x + self.sign * self.inner(x)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_linear_residual_block_is_measured_as_one(sign):
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(4, 6), MinMax(), LinearBlock(6, sign), MinMax(), nn.Linear(6, 3)).eval()
    x = torch.rand(8, 4)
    y, threat = net(x).argmax(1), hf.L2(0.2)
    graph = trace(net, x)
    with torch.no_grad():
        o = outer_bound(graph, region(threat, x, sound=False), proven_norm(), sound=False)
        bound = lipschitz_bound(graph)
        assert torch.allclose(o.rho.double(), 0.2 * bound.body, rtol=1e-4)
        found = margins(o, y)
        gaps = net(x).gather(1, y[:, None]) - net(x)
    assert bool((found >= gaps - 0.2 * bound.pairs[y].float() - 1e-5).all())
    merged = net[2].inner.weight * sign + torch.eye(6)
    expected = torch.linalg.matrix_norm(net[0].weight, 2) * torch.linalg.matrix_norm(merged, 2)
    assert o.rho.tolist() == pytest.approx([0.2 * expected.item()] * 8, rel=2e-3)


def test_a_residual_block_adds_up_both_sets():
    """f + g with f = 0 leaves the set as it is; in general the radius is at most (L_f + L_g) rho."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x):
            return torch.relu(self.f(x)) + torch.relu(self.g(x))

    torch.manual_seed(1)
    block, x = Block().eval(), torch.rand(3, 5)
    r = region(hf.L2(0.1), x, sound=False)
    norm = lambda layer: torch.linalg.matrix_norm(layer.weight, 2).item()  # noqa: E731
    with torch.no_grad():
        walk = Propagation(trace(block, x), r, proven_norm(), sound=False)
        assert walk.ball(-1).tolist() == pytest.approx([0.1 * (norm(block.f) + norm(block.g))] * 3, rel=2e-3)
        for layer in (block.f, block.g):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.eye_(block.g.weight)
        walk = Propagation(trace(block, x), r, proven_norm(), sound=False)
    assert walk.ball(-1).tolist() == pytest.approx([0.1] * 3, rel=2e-3)
    assert torch.allclose(walk.values[-1].lower, r.lower, atol=1e-6)
    assert torch.allclose(walk.values[-1].upper, r.upper, atol=1e-6)


class Branches(nn.Module):
    def forward(self, x):
        return torch.cat([x, 2 * x, torch.relu(x)], 1)


def test_the_radii_of_concatenations_and_of_pooling():
    x = torch.rand(3, 4, 6, 5)
    r = region(hf.L2(0.1), x, sound=False)
    for net, factor in (
        (Branches(), 6**0.5),
        (nn.MaxPool2d(2), 1.0),
        (nn.MaxPool2d(3, stride=1), 3.0),
        (nn.AvgPool2d(2), 0.5),
        (nn.Sequential(nn.Sigmoid(), nn.Flatten()), 0.25),
    ):
        walk = Propagation(trace(net.eval(), x), r, proven_norm(), sound=False)
        assert walk.ball(-1).tolist() == pytest.approx([0.1 * factor] * 3, rel=2e-3)


class Stretch(nn.Module):
    def forward(self, x):
        return (x - 0.5) * 1000


def test_rounding_errors_travel_through_a_run_of_affine_layers():
    net = nn.Sequential(Stretch(), nn.Linear(6, 4)).eval()
    nn.init.constant_(net[1].weight, 1e-3)
    x = torch.rand(2, 6)
    with torch.no_grad():
        walk = Propagation(trace(net, x), Region(x, x, x), proven_norm(), sound=True)
    scaled, last = walk.values[-2:]
    g, size = gamma(6, x.dtype), scaled.centre.abs().sum(1)
    at_least = 1e-3 * (scaled.error.sum(1) + 2 * g * size) + 2 * g * net[1].bias.detach().abs()[:, None]
    assert bool((last.error >= 0.999 * at_least.T).all())
    assert bool((last.error <= 1.05 * at_least.T).all())  # the box is a little larger than |centre|
    o, y = outer_bound(trace(net, x), Region(x, x, x), proven_norm(), sound=True), torch.tensor([0, 3])
    logits, error = last.centre.double(), last.error.double()
    least = logits.gather(1, y[:, None]) - logits - error - error.gather(1, y[:, None])
    found = margins(o, y).detach()
    assert bool((found <= least.scatter(1, y[:, None], 0)).all())
    assert torch.allclose(found, least.scatter(1, y[:, None], 0), atol=1e-9)


def random_mlp(seed, sizes=(10, 30, 30, 5)):
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).double().eval()


def test_the_intersection_is_tighter_than_the_printed_union():
    """As printed, the upper ends are the larger of two and the lower ends the smaller: sound, and looser."""
    corrected, printed = [], []
    for seed in range(10):
        net = random_mlp(seed)
        x, y = torch.rand(4, 10, dtype=torch.float64), torch.arange(4)
        r = region(hf.L2(0.3, low=-9, high=9), x, sound=False)
        with torch.no_grad():
            walk = Propagation(trace(net, x), r, proven_norm(), sound=False)
            o = outer_bound(trace(net, x), r, proven_norm(), sound=False)
            z, lower, upper, rho = x, r.lower, r.upper, walk.values[0].rho
            for layer in (net[0], net[2]):
                rows = layer.weight.norm(dim=1) * rho[:, None]
                middle, spread = layer((lower + upper) / 2), (upper - lower) / 2 @ layer.weight.abs().T
                z, rho = layer(z), rho * torch.linalg.matrix_norm(layer.weight, 2)
                lower, upper = torch.minimum(middle - spread, z - rows), torch.maximum(middle + spread, z + rows)
                # The same for the ReLU, where the ball gives relu(z) -+ rho.
                z = z.relu()
                lower, upper = (
                    torch.minimum(lower.relu(), z - rho[:, None]),
                    torch.maximum(upper.relu(), z + rho[:, None]),
                )
            c = o.rows[y][:, None] - o.rows
            plain = o.rho[:, None] * c.norm(dim=2)
            mask = torch.ones_like(plain).scatter(1, y[:, None], 0).bool()
            corrected.append((translations(o, y) / plain)[mask].mean())
            printed.append((largest_drop(c, z, lower, upper, rho) / plain)[mask].mean())
            assert bool((translations(o, y) <= plain + 1e-9).all())
    ratio, looser = torch.stack(corrected).mean().item(), torch.stack(printed).mean().item()
    assert ratio < looser - 0.05
    assert ratio < 0.8


def test_without_a_ball_it_is_interval_propagation_and_without_a_box_the_lipschitz_bound():
    net = random_mlp(2)
    x, y = torch.rand(5, 10, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4])
    graph, r = trace(net, x), region(hf.Linf(0.01), x, sound=False)
    with torch.no_grad():
        huge = margins(outer_bound(graph, r, lambda op, name: torch.tensor(1e9), sound=False), y)
        by_intervals = interval.margin_bounds(graph, r.lower, r.upper, y, sound=False)
        # The rows of the first layer still know the ball around the box, but no later layer does.
        assert bool((huge >= by_intervals - 1e-9).all())
        assert torch.allclose(huge, by_intervals, atol=1e-3)
        wide = Region(x - 1e6, x + 1e6, x, hf.L2(0.2))
        o = outer_bound(graph, wide, proven_norm(), sound=False)
        free = margins(type(o)(o.logits, o.rows, o.centre, o.lower - 1e6, o.upper + 1e6, o.rho, None), y)
        plain = net(x).gather(1, y[:, None]) - net(x) - 0.2 * lipschitz_bound(graph).pairs[y]
    assert torch.allclose(free, plain, rtol=1e-5)


@pytest.mark.parametrize(("size", "factor"), [(784, 28.0), (3072, 55.4256)])
def test_the_ball_around_a_linf_ball(size, factor):
    x = torch.full((2, size), 0.5, dtype=torch.float64)
    assert input_radius(region(hf.Linf(0.1), x, sound=False), sound=False).tolist() == pytest.approx([0.1 * factor] * 2)
    near = input_radius(region(hf.Linf(0.1), 0 * x, sound=False), sound=False)
    assert near.tolist() == pytest.approx([0.1 * factor] * 2)  # half of the box is cut off, its corner is not
    assert input_radius(region(hf.L1(0.3), x, sound=False), sound=False).tolist() == [0.3, 0.3]
    assert input_radius(region(hf.L2(1e3), x, sound=False), sound=False).tolist() == pytest.approx([size**0.5 / 2] * 2)


def test_a_budget_of_zero_leaves_the_margins():
    net, shape = tiny_nets()["residual"]
    x, graph, r = pieces(net, shape, hf.L2(0.0), False)
    y = net(x).argmax(1)
    with torch.no_grad():
        found = margins(outer_bound(graph, r, proven_norm(), sound=False), y)
        assert torch.allclose(found, net(x).gather(1, y[:, None]) - net(x), atol=1e-5)


def test_estimates_converge_to_the_proven_bound_and_keep_their_state():
    net, shape = tiny_nets()["cnn"]
    x, graph, r = pieces(net, shape, hf.L2(0.3), False)
    y, state = net(x).argmax(1), {}
    proven = margins(outer_bound(graph, r, proven_norm(), sound=False), y).detach()
    first = margins(outer_bound(graph, r, estimated_norm(state), sound=False), y).detach()
    vectors = {key: v.clone() for key, v in state.items()}
    for _ in range(50):
        last = margins(outer_bound(graph, r, estimated_norm(state, steps=5), sound=False), y).detach()
    assert state.keys() == vectors.keys()
    assert len(state) >= 2
    assert all(v.norm().item() == pytest.approx(1, abs=1e-4) for v in state.values())
    assert bool((first >= proven - 1e-5).all())
    assert torch.allclose(last, proven, atol=1e-2)


def test_rounding_only_loosens_and_only_a_little():
    for name, (net, shape) in tiny_nets().items():
        x, graph, _ = pieces(net, shape, THREATS[0], True, count=8)
        y = net(x).argmax(1)
        with torch.no_grad():
            exact, sound = (
                margins(outer_bound(graph, region(THREATS[0], x, sound=s), proven_norm(), sound=s), y)
                for s in (False, True)
            )
        other = torch.ones_like(exact).scatter(1, y[:, None], 0).bool()
        assert bool((sound[other] < exact[other]).all()), name
        assert torch.allclose(sound.float(), exact, atol=1e-3), name


def test_the_rounding_errors_of_every_layer_are_covered():
    """At one point, with weights that cancel: half of the rounded margins are above those of real arithmetic."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(500, 60), nn.ReLU(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 3)).eval()
    for layer, scale in ((net[0], 3.0), (net[2], 0.02), (net[4], 100.0)):
        nn.init.normal_(layer.weight, std=scale)
    x, y = torch.rand(50, 500), torch.arange(50) % 3
    graph, point = trace(net, x), Region(x, x, x)
    other = torch.ones(50, 3).scatter(1, y[:, None], 0).bool()
    with torch.no_grad():
        rounded, sound = (margins(outer_bound(graph, point, proven_norm(), sound=s), y) for s in (False, True))
        logits = deepcopy(net).double()(x.double())
        true = (logits.gather(1, y[:, None]) - logits)[other]
        walk = Propagation(graph, point, proven_norm(), sound=True)
        exact = trace(deepcopy(net).double(), x.double()).walk(x.double(), lambda n, v: evaluate(n.op, v))
    assert int((rounded[other] > true).sum()) > 20
    assert bool((sound[other] <= true).all())
    for index, (value, at) in enumerate(zip(walk.values, exact, strict=True)):
        assert bool(((value.lower <= at) & (at <= value.upper)).all())
        distance = (at - value.centre).norm(dim=1)
        assert bool((distance <= walk.ball(index)).all())
        assert index == 0 or bool((distance > 0).all())


@pytest.mark.parametrize("size", [0, 1, 7])
def test_batches_of_any_size_agree(size):
    net, shape = tiny_nets()["residual"]
    torch.manual_seed(0)
    x, y = torch.rand(7, *shape), torch.arange(7) % 3
    graph, _ = trace_batch(net, x)
    whole = margins(outer_bound(graph, region(THREATS[0], x, sound=True), proven_norm(), sound=True), y)
    part = margins(outer_bound(graph, region(THREATS[0], x[:size], sound=True), proven_norm(), sound=True), y[:size])
    assert part.shape == (size, 3)
    assert torch.allclose(part, whole[:size], atol=1e-6)


def test_a_layer_without_a_constant_is_refused():
    net = nn.Sequential(nn.Linear(4, 4), nn.Softplus(threshold=5), nn.Linear(4, 2)).eval()
    x = torch.rand(2, 4)
    with pytest.raises(UnsupportedError, match=r"layer '1'.*softplus"):
        outer_bound(trace(net, x), region(THREATS[0], x, sound=False), proven_norm(), sound=False)
