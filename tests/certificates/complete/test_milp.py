"""The exact method against enumeration of activation patterns, against bounds from both sides, and at its limits."""

import copy
import itertools
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from scipy.optimize import OptimizeResult
from torch import nn

import holdfast as hf
from enumeration import by_enumeration
from holdfast.bounding import interval
from holdfast.bounding.core.evaluation import evaluation_error
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.complete.milp import exact_margin, milp
from holdfast.certificates.complete.milp_model import affine_matrix, program, skeleton
from holdfast.certificates.crown import crown
from holdfast.certificates.ibp import ibp
from holdfast.models.layers import MinMax
from holdfast.random import Noise

WIDE = {"low": -1.0, "high": 2.0}


def mlp(sizes, activation=nn.ReLU, seed=0):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1]).double().eval()


def weights(model):
    return [
        (m.weight.detach().double().numpy(), m.bias.detach().double().numpy()) for m in model if hasattr(m, "weight")
    ]


@given(
    st.sampled_from([(2, 4, 2), (3, 6, 3), (3, 3, 3, 2), (2, 2, 2, 2, 3), (1, 5, 2)]),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 10_000),
    st.sampled_from([0.05, 0.3, 1.0]),
)
@settings(max_examples=25)
def test_equals_the_enumeration_of_patterns(sizes, slope, seed, eps):
    model = mlp(sizes, (lambda: nn.LeakyReLU(slope)) if slope else nn.ReLU, seed)
    x = torch.rand(1, sizes[0], dtype=torch.float64)
    y = model(x).argmax(1)
    found = exact_margin(model, x, y, hf.Linf(eps))
    lower, upper = (end[0].numpy() for end in hf.Linf(eps).box(x))
    truth = by_enumeration(weights(model), lower, upper, int(y), slope)
    assert bool(found.exact)
    assert float(found.margin) == pytest.approx(truth, abs=2e-6)
    assert found.status == (("certified",) if truth > 1e-4 else ("broken",) if truth < -1e-4 else found.status)
    assert bool(hf.Linf(eps).contains(found.x_adv, x).all())


SMALL = [-9e-10, 5e-10, -1e-11, 1e-15, -1e-22, 1e-30]
"""Weights that the solver drops if it sees them as they are."""
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""The box of float32 is widened by a few 1e-7, and the slopes of `cancelling` add up to some dozens."""


def cancelling(seed, weight, planted, dtype=torch.float64):
    """Two inputs, ten neurons and a constant one of size 1 / |weight| whose small `weight` is part of the margin.

    The bias takes its contribution away again, so that the smallest margin over the box is just `planted`. It is
    attained at a corner or where two of the lines cross at which a neuron switches or the box ends.
    """
    rng = np.random.default_rng(seed)
    slopes, out = 3 * rng.standard_normal((10, 2)), rng.standard_normal(10)
    shift = 0.2 * rng.standard_normal(10) - slopes.sum(1) / 2
    model = nn.Sequential(nn.Linear(2, 11), nn.ReLU(), nn.Linear(11, 2)).to(dtype).eval().requires_grad_(False)
    slopes, shift, out, ends = (torch.tensor(v, dtype=dtype) for v in (slopes, shift, out, [weight, 1 / abs(weight)]))
    x = torch.full((1, 2), 0.5, dtype=dtype)
    lower, upper = (end[0].double().numpy() for end in hf.Linf(0.2).box(x))
    lines = np.concatenate([slopes.double().numpy(), np.eye(2), np.eye(2)])
    at = np.concatenate([-shift.double().numpy(), lower, upper])
    pairs = [list(pair) for pair in itertools.combinations(range(14), 2) if abs(np.linalg.det(lines[list(pair)])) > 0]
    crossings = np.stack([np.linalg.solve(lines[pair], at[pair]) for pair in pairs])
    crossings = crossings[((crossings >= lower - 1e-12) & (crossings <= upper + 1e-12)).all(1)]
    hidden = np.maximum(crossings @ slopes.double().numpy().T + shift.double().numpy(), 0)
    smallest = float((hidden @ out.double().numpy()).min())
    model[0].weight.copy_(torch.cat([slopes, torch.zeros(1, 2, dtype=dtype)]))
    model[0].bias.copy_(torch.cat([shift, ends[1:]]))
    model[2].weight.copy_(torch.stack([torch.cat([out, ends[:1]]), torch.zeros(11, dtype=dtype)]))
    model[2].bias.copy_(torch.tensor([planted - smallest - float(ends[0].double() * ends[1].double()), 0.0]))
    return model, x, torch.tensor([0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", SMALL)
def test_small_weights_with_large_effects_are_not_dropped(weight, dtype):
    """The margin of every network goes down to -0.02; without its small weight it would be 1 more, or 1 less."""
    for seed in range(4):
        model, x, y = cancelling(seed, weight, -0.02, dtype)
        if model(x).argmax() == 0:
            assert not bool(hf.certify(model, x, y, hf.Linf(0.2), "milp").certified)
        found = exact_margin(model, x, y, hf.Linf(0.2))
        assert found.status == ("broken",)
        assert bool(found.exact)
        assert float(found.margin) == pytest.approx(-0.02, abs=CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", SMALL)
def test_small_weights_with_large_effects_leave_the_exact_answer(weight, dtype):
    for seed in range(2):
        model, x, y = cancelling(seed, weight, 0.02, dtype)
        assert bool(hf.certify(model, x, y, hf.Linf(0.2), "milp").certified)
        assert float(exact_margin(model, x, y, hf.Linf(0.2)).margin) == pytest.approx(0.02, abs=CLOSE[dtype])


@pytest.mark.parametrize(("dtype", "decades"), [(torch.float64, 30), (torch.float32, 10)])
@pytest.mark.parametrize("planted", [-0.02, 0.02])
def test_the_answer_does_not_depend_on_the_scale_of_neurons(dtype, decades, planted):
    """Powers of two from 10^-decades to 10^decades go into a neuron and out of it again: not a bit changes."""
    for seed in range(4):
        model, x, y = cancelling(seed, 0.5, planted, dtype)
        limit = int(decades / np.log10(2))
        factor = 2.0 ** torch.randint(-limit, limit + 1, (11,), generator=torch.Generator().manual_seed(seed))
        before = model(x)
        model[0].weight.mul_(factor[:, None])
        model[0].bias.mul_(factor)
        model[2].weight.div_(factor)
        assert torch.equal(model(x), before)
        found = exact_margin(model, x, y, hf.Linf(0.2))
        assert found.status == (("certified",) if planted > 0 else ("broken",))
        assert float(found.margin) == pytest.approx(planted, abs=CLOSE[dtype])


@pytest.mark.parametrize("exponent", [-100, -60, -20, 20, 60, 100])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_margin_scales_with_the_layers(exponent, layer):
    """A factor of 1e-30 to 1e30 on a layer is one on the margin, and changes nothing else."""
    for seed, planted in itertools.product(range(3), (-0.02, 0.02)):
        model, x, y = cancelling(seed, 0.5, planted)
        model[layer].weight.mul_(2.0**exponent)
        model[layer].bias.mul_(2.0**exponent)
        if layer == 0:
            model[2].bias.mul_(2.0**exponent)
        found = exact_margin(model, x, y, hf.Linf(0.2))
        assert found.status == (("certified",) if planted > 0 else ("broken",))
        assert float(found.margin) * 2.0**-exponent == pytest.approx(planted, abs=CLOSE[torch.float64])
        assert bool(milp(model, x, y, hf.Linf(0.2)).certified) == (planted > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wild_weights_are_bounded_soundly_or_left_open(dtype):
    """Every weight has a size of its own, from 1e-30 to 1e30; no answer may contradict a point of a dense grid."""
    threat, decades, certified = hf.Linf(0.2), 30.0 if dtype == torch.float64 else 8.0, 0
    grid = torch.cartesian_prod(*[torch.linspace(0.3, 0.7, 41, dtype=dtype)] * 2)
    for seed in range(60):
        model = mlp((2, 6, 4, 2), seed=seed).to(dtype).requires_grad_(False)
        for p in model.parameters():
            p.mul_(10.0 ** (decades * (2 * torch.rand(p.shape, dtype=dtype) - 1)))
        x = torch.full((1, 2), 0.5, dtype=dtype)
        y = model(x).argmax(1)
        result = milp(model, x, y, threat, time_limit=5.0)
        reached = margin_of(model, grid, y.expand(len(grid)))
        assert float(result.margin) <= float(reached.min())
        assert not bool(result.certified) or bool((model(grid).argmax(1) == y).all())
        certified += int(result.certified)
    assert 0 < certified < 60


def golden(dtype=torch.float64):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).to(dtype).eval()
    values = ([[1.0, 1.0], [1.0, -1.0]], [0.0, -0.1], [[1.0, -0.5], [-0.5, 1.0]], [0.0, 0.0])
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = torch.tensor(value, dtype=dtype)
    return model, torch.tensor([[0.5, 0.25]], dtype=dtype)


class WithMaximum(nn.Module):
    """The values of an image, and then their maximum."""

    def forward(self, x):
        return torch.cat([torch.flatten(x, 1), torch.flatten(nn.functional.max_pool2d(x, (1, 2)), 1)], 1)


def test_a_maximum_solved_by_hand():
    """x_1 + x_2 - 1.5 max + 1 over the unit square is 1/2, at a corner; a maximum above both values would give -1/2."""
    model = nn.Sequential(WithMaximum(), nn.Linear(3, 2)).double().eval()
    model[1].weight.data = torch.tensor([[1.0, 1.0, -1.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    model[1].bias.data = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = exact_margin(model, torch.full((1, 1, 1, 2), 0.5).double(), torch.tensor([0]), hf.Linf(0.5))
    assert found.exact.item()
    assert found.margin.item() == pytest.approx(0.5, abs=1e-6)


def test_the_margin_of_the_certificate_pays_for_the_rounding_of_the_model():
    """Without an activation CROWN's margins are exact, so the certificate's differs from them by the slack alone."""
    torch.manual_seed(0)
    model, x, threat = nn.Sequential(nn.Linear(50, 3)).eval(), torch.rand(8, 50), hf.Linf(0.01)
    y = model(x).argmax(1)
    found, result = exact_margin(model, x, y, threat), milp(model, x, y, threat)
    assert bool((found.slack > 1e-6).all())
    assert bool((result.margin.double() <= found.margin - found.slack).all())
    assert torch.allclose(result.margin.double(), found.margin - found.slack, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_case_solved_by_hand(dtype):
    model, x = golden(dtype)
    found = exact_margin(model, x, torch.tensor([0]), hf.Linf(0.2, **WIDE))
    assert float(found.margin) == pytest.approx(0.30, abs=3e-6)
    assert found.status == ("certified",)
    assert torch.equal(found.x_adv, x)
    assert float(found.slack) < 1e-5
    assert found.margin.dtype == torch.float64
    # At 0.4 the worst corner is (0.9, -0.15): margin 1.5 (0.75) - 1.5 (0.95) = -0.3.
    found = exact_margin(model, x, torch.tensor([0]), hf.Linf(0.4, **WIDE))
    assert float(found.margin) == pytest.approx(-0.30, abs=3e-6)
    assert found.status == ("broken",)
    assert model(found.x_adv).argmax() == 1
    assert found.x_adv.dtype == dtype


class Block(nn.Module):
    """Residual and concatenating, on images of 2 x 4 x 3."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv((x - 0.4) / 0.5)))
        return self.head(torch.cat([h + x, x - h], 1).flatten(1))


def layered_nets():
    """Name -> (network, shape of one input, budget that leaves some neurons open)."""
    torch.manual_seed(3)
    tiny = tiny_nets()
    nets = {
        "linear": (*tiny["linear"], 0.1),
        "mlp": (*tiny["mlp"], 0.1),
        "cnn": (*tiny["cnn"], 0.1),
        "pooled": (*tiny["pooled"], 0.05),
        "block": (Block(), (2, 4, 3), 0.1),
        "minmax": (nn.Sequential(nn.Linear(4, 8), MinMax(), nn.Linear(8, 6), MinMax(), nn.Linear(6, 3)), (4,), 0.2),
        "conv-minmax": (
            nn.Sequential(nn.Conv2d(1, 4, 2, stride=(2, 1)), MinMax(), nn.Flatten(), nn.Linear(24, 2)),
            (1, 4, 4),
            0.2,
        ),
        "overlapping-pools": (
            nn.Sequential(
                nn.Conv2d(1, 2, 2, groups=1), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.Flatten(), nn.Linear(12, 3)
            ),
            (1, 4, 5),
            0.2,
        ),
    }
    return {name: (net.eval(), shape, eps) for name, (net, shape, eps) in nets.items()}


@pytest.fixture(params=list(layered_nets()))
def layered(request):
    return layered_nets()[request.param]


def margin_of(model, x, y):
    logits = model(x)
    others = logits.scatter(1, y[:, None], -torch.inf)
    return logits.gather(1, y[:, None])[:, 0] - others.amax(1)


def test_lies_between_every_bound_and_every_point(layered):
    model, shape, eps = layered
    threat = hf.Linf(eps)
    x = torch.rand(3, *shape)
    with torch.no_grad():
        y = model(x).argmax(1)
        found = exact_margin(model, x, y, threat)
        assert bool(found.exact.all())
        for certificate in (ibp, crown):
            assert bool((found.margin + 1e-5 >= certificate(model, x, y, threat).margin).all())
        attacked = hf.attack(model, x, y, threat, "pgd", steps=40).x_adv
        points = [attacked] + [threat.random_start(x, Noise.for_batch(seed, 3)) for seed in range(50)]
        reached = torch.stack([margin_of(model, point, y) for point in points]).amin(0)
        assert bool((found.margin <= reached + found.slack).all())
    for i, status in enumerate(found.status):
        if status == "broken":
            assert bool(threat.contains(found.x_adv, x)[i])
            assert model(found.x_adv[i : i + 1]).argmax() != y[i]


def test_the_minimum_is_attained_at_a_point_of_the_set(layered):
    """With the least likely class as the label all breaks, and x_adv has just the margin that is claimed."""
    model, shape, eps = layered
    model = model.double()
    x = torch.rand(2, *shape, dtype=torch.float64)
    y = model(x).argmin(1)
    found = exact_margin(model, x, y, hf.Linf(eps))
    assert found.status == ("broken", "broken")
    assert torch.allclose(margin_of(model, found.x_adv, y), found.margin, atol=1e-5)
    assert bool((found.margin <= margin_of(model, x, y)).all())


def test_the_verdict_agrees_with_the_exact_margin(layered):
    model, shape, eps = layered
    x = torch.rand(3, *shape)
    y = model(x).argmax(1)
    for scale in (0.1, 1.0):
        threat = hf.Linf(eps * scale)
        exact = exact_margin(model, x, y, threat)
        quick = milp(model, x, y, threat)
        assert quick.certified.tolist() == [status == "certified" for status in exact.status]
        assert bool((quick.margin <= exact.margin).all())
        assert bool((quick.certified == (quick.margin > 0)).all())
        assert quick.by == tuple("milp" if status != "unknown" else "" for status in exact.status)
        broken = model(quick.x_adv).argmax(1) != y
        assert broken.tolist() == [status == "broken" for status in exact.status]
        assert quick.margin.dtype == x.dtype
        assert bool(quick.certified[crown(model, x, y, threat).margin > 1e-3].all())


def test_decides_what_crown_leaves_open():
    """Around the exact radius of an input: certified below it, broken above it, while CROWN stops much earlier."""
    model = mlp((6, 12, 12, 3), seed=4)
    x = torch.rand(1, 6, dtype=torch.float64)
    y = model(x).argmax(1)
    low, high = 0.0, 1.0
    for _ in range(8):
        middle = (low + high) / 2
        status = exact_margin(model, x, y, hf.Linf(middle)).status[0]
        assert status in ("certified", "broken")
        low, high = (middle, high) if status == "certified" else (low, middle)
    assert 0 < low < high < 1
    assert bool(milp(model, x, y, hf.Linf(low)).certified)
    assert not bool(crown(model, x, y, hf.Linf(low)).certified)


def test_wrong_inputs_are_broken_and_ties_are_not_certified():
    model = nn.Linear(2, 2).eval()
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    x = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.8, 0.2]])
    y = torch.zeros(3, dtype=torch.long)
    found = exact_margin(model, x, y, hf.Linf(0.0))
    assert found.status == ("broken", "unknown", "certified")
    assert torch.allclose(found.margin, torch.tensor([-0.6, 0.0, 0.6], dtype=torch.float64), atol=1e-6)
    assert torch.equal(found.x_adv, x)
    result = hf.certify(model, x, y, hf.Linf(0.0), "milp")
    assert result.certified.tolist() == [False, False, True]
    assert float(result.margin[0]) <= 0


def test_one_input_at_a_time_or_both_and_boxes_of_their_own():
    model = mlp((3, 8, 3), seed=1).float()
    x = torch.rand(2, 3)
    y = model(x).argmax(1)
    radius = torch.tensor([[0.1, 0.0, 0.3], [0.0, 0.2, 0.05]])
    both = exact_margin(model, x, y, hf.Box(radius, batched=True))
    for i in range(2):
        alone = exact_margin(model, x[i : i + 1], y[i : i + 1], hf.Box(radius[i]))
        assert float(alone.margin) == pytest.approx(float(both.margin[i]), abs=2e-6)
        lower, upper = (end[i].double().numpy() for end in hf.Box(radius, batched=True).box(x))
        assert float(alone.margin) == pytest.approx(by_enumeration(weights(model), lower, upper, int(y[i])), abs=5e-6)
    ball = exact_margin(model, x, y, hf.Box(torch.full((3,), 0.1)))
    assert torch.allclose(ball.margin, exact_margin(model, x, y, hf.Linf(0.1)).margin, atol=3e-6)


def hard_case():
    model = mlp((20, 40, 40, 40, 3), seed=2)
    x = torch.rand(1, 20, dtype=torch.float64)
    return model.requires_grad_(False), x, model(x).argmax(1)


def test_the_time_limit_is_kept_and_the_bound_stays_proven():
    model, x, y = hard_case()
    threat = hf.Linf(0.5)
    start = time.monotonic()
    found = exact_margin(model, x, y, threat, time_limit=1.0)
    assert time.monotonic() - start < 8
    assert not bool(found.exact)
    assert found.status[0] in ("unknown", "broken")
    assert float(found.margin) >= float(crown(model, x, y, threat).margin) - 1e-9
    assert float(found.margin) <= float(margin_of(model, hf.attack(model, x, y, threat, "pgd").x_adv, y))
    nothing = milp(model, x, y, threat, time_limit=1e-9)
    assert not bool(nothing.certified)
    assert float(nothing.margin) == pytest.approx(float(crown(model, x, y, threat).margin), abs=1e-3)


def test_too_many_binaries_leave_the_input_undecided():
    model, x, y = hard_case()
    found = exact_margin(model, x, y, hf.Linf(0.5), max_binaries=10)
    assert found.status == ("unknown",)
    assert int(found.binaries) > 10
    assert int(found.nodes) == 0
    assert float(found.margin) == pytest.approx(float(crown(model, x, y, hf.Linf(0.5)).margin), abs=1e-9)
    assert not bool(milp(model, x, y, hf.Linf(0.5), max_binaries=10).certified)
    # Where CROWN's own bound is enough, no binary is needed for the verdict.
    assert bool(milp(model, x, y, hf.Linf(1e-4), max_binaries=0).certified)


def test_overflow_proves_nothing():
    """The logits at x are finite, those around it are not: 1e200 twice is more than float64 holds."""
    model = mlp((2, 3, 2))
    for layer in (model[0], model[2]):
        layer.weight.data *= 1e200
        layer.bias.data *= 1e-200
    x = torch.zeros(1, 2, dtype=torch.float64)
    result = milp(model, x, model(x).argmax(1), hf.Linf(0.5))
    assert not bool(result.certified)
    assert float(result.margin) == -torch.inf


def test_an_input_that_overflows_leaves_the_others_of_its_batch_alone():
    """Its neurons switch on at 0.25, and 0.25 * 1e310 is more than float64 holds; those of the others stay off."""
    model = mlp((2, 2, 2, 2))
    parts = ((1e100, -0.25e100), (1e105, 0.0), (1e105, [1.0, 0.0]))
    for layer, (weight, bias) in zip(model[::2], parts, strict=True):
        layer.weight.data = weight * torch.eye(2, dtype=torch.float64)
        layer.bias.data = torch.as_tensor(bias, dtype=torch.float64).expand(2).clone()
    x = torch.zeros(3, 2, dtype=torch.float64)
    radius = torch.tensor([0.1, 0.5, 0.1], dtype=torch.float64)[:, None].expand(3, 2)
    result = milp(model, x, torch.zeros(3, dtype=torch.long), hf.Box(radius, batched=True))
    assert result.certified.tolist() == [True, False, True]
    assert float(result.margin[1]) == -torch.inf


@pytest.mark.parametrize("status", [2, 3, 4])
def test_numerical_trouble_of_the_solver_proves_nothing(monkeypatch, status):
    """The network itself is always a solution: "infeasible" must not be read as "no counter-example"."""
    model, x, y = hard_case()
    answer = OptimizeResult(status=status, fun=None, x=None)
    monkeypatch.setattr("scipy.optimize.linprog", lambda *args, **options: answer)
    found = exact_margin(model, x, y, hf.Linf(0.5))
    assert found.status == ("unknown",)
    assert float(found.margin) == pytest.approx(float(crown(model, x, y, hf.Linf(0.5)).margin), abs=1e-9)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e3])
def test_a_solver_that_answers_at_random_proves_nothing_false(monkeypatch, size):
    """Points, multipliers and claims of optimality are made up: the bounds become weak, never wrong."""
    rng = np.random.default_rng(0)

    def made_up(cost, *, b_ub, b_eq, **rest):
        parts = {
            "eqlin": OptimizeResult(marginals=size * rng.standard_normal(len(b_eq))),
            "ineqlin": OptimizeResult(marginals=size * rng.standard_normal(len(b_ub))),
        }
        return OptimizeResult(status=0, fun=1e9, x=rng.random(len(cost)), **parts)

    monkeypatch.setattr("scipy.optimize.linprog", made_up)
    for seed in range(5):
        model = mlp((3, 6, 3), seed=seed)
        x = torch.rand(1, 3, dtype=torch.float64)
        y = model(x).argmax(1)
        lower, upper = (end[0].numpy() for end in hf.Linf(0.5).box(x))
        with monkeypatch.context() as honest:
            honest.undo()
            truth = by_enumeration(weights(model), lower, upper, int(y))
        assert float(exact_margin(model, x, y, hf.Linf(0.5)).margin) <= truth + 1e-9
        assert bool(milp(model, x, y, hf.Linf(0.5)).certified) <= (truth > 0)


def test_one_output_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).eval()
    with pytest.raises(hf.InputError, match="one output"):
        exact_margin(model, torch.rand(2, 3), torch.zeros(2, dtype=torch.long), hf.Linf(0.1))


@pytest.mark.parametrize(("layer", "name"), [(nn.Sigmoid(), "sigmoid"), (nn.Softplus(), "softplus")])
def test_a_layer_that_is_not_piecewise_linear_is_refused(layer, name):
    model = nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 2)).eval()
    with pytest.raises(hf.UnsupportedError, match=rf"layer '1'.*'{name}'.*method='crown'"):
        milp(model, torch.rand(1, 2), torch.tensor([0]), hf.Linf(0.1))


def test_bad_arguments_are_refused():
    model, x = golden()
    y = torch.tensor([0])
    with pytest.raises(hf.UnsupportedError, match=r"'milp' does not handle the threat 'l2:0.1'"):
        exact_margin(model, x, y, hf.L2(0.1))
    with pytest.raises(hf.InputError, match="outside the classes"):
        exact_margin(model, x, y + 2, hf.Linf(0.1))
    with pytest.raises(hf.InputError, match=r"'time_limit'.*expected a number > 0"):
        exact_margin(model, x, y, hf.Linf(0.1), time_limit=0)
    with pytest.raises(hf.InputError, match=r"'max_binaries'.*expected an integer >= 0"):
        exact_margin(model, x, y, hf.Linf(0.1), max_binaries=-1)


def test_the_model_is_left_as_it_came():
    model, x = golden(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exact_margin(model, x, torch.tensor([0]), hf.Linf(0.1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.dtype == torch.float32
    assert model[0].weight.requires_grad


CONVOLUTIONS = [
    nn.Conv2d(2, 4, 3, padding=1),
    nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(0, 1)),
    nn.Conv2d(2, 4, 2, dilation=2, groups=2, bias=False),
    nn.Conv2d(2, 6, 3, stride=2, padding=2, groups=2),
]


@pytest.mark.parametrize("layer", [*CONVOLUTIONS, nn.AvgPool2d(2, ceil_mode=True), nn.Linear(5, 3)], ids=str)
def test_an_affine_layer_equals_its_matrix(layer):
    x = torch.rand(3, 2, 6, 5, dtype=torch.float64)
    graph = trace(nn.Sequential(layer).double().eval(), x)
    (node,) = (node for node in graph.nodes if isinstance(node.op, ops.Affine))
    with torch.no_grad():
        matrix, bias = affine_matrix(node.op, (2, 6, 5), node.shape)
        expected = layer(x).flatten(1).numpy()
    assert np.allclose(x.flatten(1).numpy() @ matrix.toarray().T + bias, expected, atol=1e-12)


def switched(layer, x, radius):
    """The program of one layer over a box, the bounds of its input, and the entries of each binary column, sorted."""
    graph = trace(nn.Sequential(layer, nn.Flatten()).eval(), x)
    bounds = interval.propagate(graph, x - radius, x + radius, sound=True)
    task = program(skeleton(graph), [(low[0].numpy(), high[0].numpy()) for low, high in bounds])
    entries = [np.sort(task.matrix[:, [column]].data) for column in np.flatnonzero(task.integer)]
    return *(end[0].flatten() for end in bounds[0]), entries


@pytest.mark.parametrize("slope", [0.0, 0.1, 1 / 3, 0.7])
def test_the_rows_of_an_activation_are_rounded_outward(slope):
    """The entries -(1 - slope) u and -(1 - slope) l of a binary, against their values in rational arithmetic."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 20, 20, dtype=torch.float64)
    lower, upper, entries = switched(nn.LeakyReLU(slope) if slope else nn.ReLU(), x, torch.rand_like(x))
    open_ = ((lower < 0) & (upper > 0)).nonzero().ravel().tolist()
    assert len(open_) == len(entries) > 100
    for k, (high, low) in zip(open_, entries, strict=True):
        assert Fraction(-high) >= (1 - Fraction(slope)) * Fraction(float(upper[k]))
        assert Fraction(-low) <= (1 - Fraction(slope)) * Fraction(float(lower[k]))


def test_the_rows_of_a_maximum_are_rounded_outward():
    """The entry U - l of a binary of a pair, where U bounds the other value; the second entry is that of the sum."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 400, 2, dtype=torch.float64)
    lower, upper, entries = switched(nn.MaxPool2d((1, 2)), x, torch.rand_like(x))
    lower, upper = lower.view(-1, 2), upper.view(-1, 2)
    open_ = (upper.amin(1) > lower.amax(1)).nonzero().ravel().tolist()
    assert 2 * len(open_) == len(entries) > 100
    for k, found in zip(itertools.product(open_, (0, 1)), entries, strict=True):
        span = Fraction(float(upper[k[0], 1 - k[1]])) - Fraction(float(lower[k]))
        assert min(abs(Fraction(e) - span) for e in found) < 1e-12
        assert any(span <= Fraction(e) < span + 1e-12 for e in found)


def test_the_rounding_term_covers_what_float32_does(layered):
    model, shape, _ = layered
    x = torch.rand(64, *shape)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        graph = trace(exact, x.double())
        values = graph.walk(x.double(), lambda node, given: ops.evaluate(node.op, given))
        error = evaluation_error(graph, [(v, v) for v in values], torch.float32)
        missed = (model(x).double() - values[-1]).abs()
        assert bool((missed <= error).all())
        assert float(error.max()) < 1e-3 * float(values[-1].abs().max())
