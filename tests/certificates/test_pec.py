"""Distances against LP and dual bisection; PEC against its baselines and against attacks."""

from fractions import Fraction
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import tiny_nets
from scipy.optimize import linprog
from torch import nn

import holdfast as hf
from holdfast.bounding.core.region import balls
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear.relaxation import margin_planes, relaxation
from holdfast.certificates.core.distance import NORMS, HalfSpaces, distance, dual, half_spaces, reach
from holdfast.certificates.kw import kw
from holdfast.certificates.pec import pec
from holdfast.testing import check_certificate

KINDS = {"linf": hf.Linf, "l2": hf.L2, "l1": hf.L1}
DUAL = {"linf": 1, "l2": 2, "l1": torch.inf}


def problems(seed, count=12, size=5, sound=False):
    """Random half-spaces around random inputs in [0, 1], some of them with zero slopes and values at the border."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, size, generator=g).double()
    x[::3, 0] = 0.0
    slope = torch.randn(count, 4, size, generator=g).double()
    slope[1::4, :, 1] = 0.0
    slope[0, 0] = 0.0
    shift = torch.randn(count, 4, generator=g).double() * 2
    return x, slope, shift, half_spaces(x, slope, shift, valid=(0.0, 1.0), sound=sound)


def by_linear_program(a, b, low, high, norm):
    """min |d|_p subject to <a, d> + b <= 0 and low <= d <= high, for p = inf or 1, with t >= |d|."""
    if b <= 0:
        return 0.0
    n = len(a)
    count = 1 if norm == "linf" else n
    tie = np.ones((n, 1)) if norm == "linf" else np.eye(n)
    eye, zero = np.eye(n), np.zeros(count)
    above = np.vstack([np.hstack([eye, -tie]), np.hstack([-eye, -tie]), np.hstack([a, zero])[None]])
    limits = np.concatenate([np.zeros(2 * n), [-b]])
    ranges = [*zip(low, high, strict=True), *[(0, None)] * count]
    found = linprog(np.concatenate([np.zeros(n), np.ones(count)]), above, limits, bounds=ranges)
    return found.fun if found.status == 0 else np.inf


def by_bisection(a, b, low, high):
    """p = 2: the optimal d is clip(-s a, low, high) for the smallest s with <a, d> + b <= 0."""
    if b <= 0:
        return 0.0

    def gap(s):
        return a @ np.clip(-s * a, low, high) + b

    right = 1.0
    while gap(right) > 0:
        right *= 2
        if right > 1e18:
            return np.inf
    left = 0.0
    for _ in range(200):
        middle = (left + right) / 2
        left, right = (middle, right) if gap(middle) > 0 else (left, middle)
    return float(np.linalg.norm(np.clip(-right * a, low, high)))


@pytest.mark.parametrize("norm", NORMS)
def test_distance_in_the_range_is_the_optimum(norm):
    infinite = zero = 0
    for seed in range(6):
        x, slope, _, h = problems(seed)
        ours = distance(dual(h, norm))
        for i in range(len(x)):
            low, high = -x[i].numpy(), 1 - x[i].numpy()
            for k in range(4):
                a, b = slope[i, k].numpy(), float(h.value[i, k])
                solve = by_bisection(a, b, low, high) if norm == "l2" else by_linear_program(a, b, low, high, norm)
                assert float(ours[i, k]) == pytest.approx(solve, abs=1e-9)
                infinite, zero = infinite + (solve == np.inf), zero + (solve == 0)
    assert infinite > 10
    assert zero > 10


@pytest.mark.parametrize("norm", NORMS)
def test_distance_without_a_range_is_value_over_dual_norm(norm):
    x, slope, shift, inside = problems(0)
    free = half_spaces(x, slope, shift, valid=None, sound=False)
    value = (slope * x[:, None]).sum(2) + shift
    expected = value.clamp(min=0) / torch.linalg.vector_norm(slope, DUAL[norm], dim=2)
    found = distance(dual(free, norm))
    assert torch.allclose(found[1:], expected[1:], atol=1e-12)
    assert found[0, 0] == (torch.inf if value[0, 0] > 0 else 0.0)
    assert bool((distance(dual(inside, norm)) >= found - 1e-12).all())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e-163, 1e-170, 1e-250])
def test_sound_distances_are_below_the_exact_ones_even_where_squares_underflow(norm, scale):
    """Rational arithmetic, for values that lose digits next to the products and slopes whose squares are lost."""
    x, slope, shift, _ = problems(1)
    slope, shift = scale * slope, scale * shift
    found = distance(dual(half_spaces(x, slope, shift, valid=None, sound=True), norm))
    positive = 0
    for i, k in np.ndindex(*found.shape):
        a, b = [Fraction(v) for v in slope[i, k].tolist()], Fraction(shift[i, k].item())
        value = max(0, sum(u * Fraction(v) for u, v in zip(a, x[i].tolist(), strict=True)) + b)
        square = {"linf": sum(map(abs, a)) ** 2, "l2": sum(u**2 for u in a), "l1": max(map(abs, a)) ** 2}[norm]
        if found[i, k] == torch.inf:
            assert square == 0 < value
        else:
            assert Fraction(found[i, k].item()) ** 2 * square <= value**2
        positive += bool(found[i, k] > 0)
    assert positive > 10


@pytest.mark.parametrize("norm", NORMS)
def test_products_that_underflow_prove_no_distance(norm):
    """Ten products of -2e-324 round to zero each, but their exact sum outweighs a shift of 5e-324: x is inside."""
    x = torch.full((1, 10), 0.4, dtype=torch.float64)
    slope, shift = torch.full((1, 1, 10), -5e-324, dtype=x.dtype), torch.full((1, 1), 5e-324, dtype=x.dtype)
    plain, sound = (half_spaces(x, slope, shift, valid=None, sound=s) for s in (False, True))
    assert plain.value.item() > 0
    assert distance(dual(sound, norm)).item() == 0


@given(st.integers(0, 10_000), st.sampled_from(NORMS))
def test_a_larger_range_brings_the_half_space_nearer(seed, norm):
    x, slope, shift, small = problems(seed)
    large = half_spaces(x, slope, shift, valid=(-0.5, 1.5), sound=False)
    assert bool((distance(dual(large, norm)) <= distance(dual(small, norm)) + 1e-12).all())


@given(st.integers(0, 10_000), st.sampled_from(NORMS), st.sampled_from([0.05, 0.3, 1.0]))
def test_reach_is_positive_exactly_below_the_distance(seed, norm, eps):
    h = problems(seed)[3]
    far, value = distance(dual(h, norm)), reach(dual(h, norm), torch.full((12,), eps))
    clear = (far - eps).abs() > 1e-9
    assert bool(((value > 0) == (far > eps))[clear].all())


@pytest.mark.parametrize("norm", NORMS)
def test_rounding_only_ever_shrinks_a_distance_and_hardly(norm):
    exact, safe = (distance(dual(problems(3, sound=sound)[3], norm)) for sound in (False, True))
    assert bool((safe <= exact).all())
    finite = exact.isfinite() & (exact > 1e-6)
    assert bool((safe < exact)[finite].all())
    assert torch.allclose(safe[finite], exact[finite], rtol=1e-9)


def test_rounding_error_of_the_value_is_subtracted_under_cancellation():
    """<u, x> is about 1e16 times the shift: no digit of the value is right, so nothing may be claimed."""
    x = torch.tensor([[0.1, 0.3]]).double()
    slope = torch.tensor([[[3e16, -1e16]]]).double()
    shift = torch.tensor([[1.0]]).double()
    assert distance(dual(half_spaces(x, slope, shift, valid=None, sound=True), "linf")).item() == 0.0


def test_overflowing_planes_prove_nothing():
    inf = torch.tensor([[[torch.inf, 1.0]]]).double()
    h = HalfSpaces(inf, torch.tensor([[torch.inf]]).double(), None, True)
    assert distance(dual(h, "linf")).item() == 0.0


@pytest.mark.parametrize("norm", NORMS)
def test_the_radius_is_that_of_one_optimisation_for_each_input_and_class(norm):
    model, shape = tiny_nets()["mlp"]
    model, x = model.double(), torch.rand(12, *shape).double()
    y = model(x).argmax(1)
    threat = KINDS[norm]({"linf": 0.1, "l2": 0.2, "l1": 0.3}[norm])
    with torch.no_grad():
        radius = pec(model, x, y, threat).radius
        ball = balls(threat, x, torch.full((12,), threat.eps).double(), sound=False)
        planes = margin_planes(relaxation(trace(model, x), ball, slopes="parallel", hidden=True, sound=False), y)
    slope, value = planes.coefficients.values, planes.coefficients.values @ x[..., None]
    value, partial = value[..., 0] + planes.shift, 0
    for i in range(12):
        box = (-x[i].numpy(), 1 - x[i].numpy())
        others = [(slope[i, k].numpy(), float(value[i, k])) for k in range(slope.shape[1]) if k != y[i]]
        far = [by_bisection(a, b, *box) if norm == "l2" else by_linear_program(a, b, *box, norm) for a, b in others]
        assert float(radius[i]) == pytest.approx(min(threat.eps, *far), abs=1e-8)
        partial += 0 < min(far) < threat.eps
    assert partial > 1


@pytest.mark.parametrize("norm", NORMS)
def test_the_distances_and_the_margins_share_one_sort(norm, monkeypatch):
    module, calls = import_module("holdfast.certificates.core.distance"), []
    monkeypatch.setattr(module, "split", lambda *given, plain=module.split: calls.append(1) or plain(*given))
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(5, *shape)
    pec(model, x, model(x).argmax(1), KINDS[norm](0.1))
    assert len(calls) == 1


@pytest.mark.parametrize("norm", NORMS)
def test_linear_classifier_has_its_exact_radius(norm):
    model = nn.Linear(4, 3).double().eval()
    x = torch.rand(30, 4).double()
    y = model(x).argmax(1)
    result = pec(model, x, y, KINDS[norm](5.0, low=-50, high=50), in_range=False)
    weight, logits = model.weight.detach(), model(x).detach()
    gap = weight[y][:, None] - weight
    margin = (logits.gather(1, y[:, None]) - logits).scatter(1, y[:, None], torch.inf)
    expected = (margin / torch.linalg.vector_norm(gap, DUAL[norm], dim=2)).amin(1).clamp(max=5.0)
    assert torch.allclose(result.radius, expected, rtol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("slopes", ["parallel", "adaptive"])
def test_never_below_the_all_or_nothing_certificates(net, norm, slopes):
    model, shape = net
    x = torch.rand(20, *shape)
    y = model(x).argmax(1)
    gained = torch.zeros(20, dtype=torch.bool)
    for eps in (0.01, 0.03, 0.06):
        threat = KINDS[norm](eps)
        ours = hf.certify(model, x, y, threat, "fastlin" if slopes == "parallel" else "crown").certified
        found = pec(model, x, y, threat, slopes=slopes)
        assert bool((found.certified >= ours).all())
        assert torch.equal(found.certified, found.radius >= eps)
        assert bool((found.radius <= torch.tensor(eps)).all())
        gained |= ~found.certified & (found.radius > 0)
        if slopes == "parallel":
            baseline = kw(model, x, y, threat)
            assert torch.equal(baseline.certified, ours)
            assert torch.equal(baseline.radius, torch.where(ours, eps, 0.0))
            assert bool((found.radius >= baseline.radius).all())
            assert set(baseline.by) <= {"kw", ""}
    if shape == (6,) and norm == "linf":
        assert bool(gained.any()), "at some budget only the envelope should prove something"


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "options", [{}, {"hidden": False}, {"forward": True}, {"in_range": False}, {"slopes": "adaptive"}], ids=str
)
def test_no_attack_succeeds_inside_the_radius(norm, options):
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(24, *shape)
    y = model(x).argmax(1)
    eps = {"linf": 0.1, "l2": 0.2, "l1": 0.3}[norm]
    with torch.no_grad():
        radius = pec(model, x, y, KINDS[norm](eps), **options).radius
    assert int(((radius > 0) & (radius < eps)).sum()) > 3
    for i in radius.argsort(descending=True)[::6].tolist():
        threat = KINDS[norm](float(radius[i]) * (1 - 1e-6))
        assert not bool(hf.attack(model, x[i : i + 1], y[i : i + 1], threat, "pgd", seed=i, steps=20).success)


def test_range_and_tighter_bounds_pay():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(60, *shape)
    y = model(x).argmax(1)
    threat = hf.Linf(0.1)
    full, free, loose = (pec(model, x, y, threat, **o).radius for o in ({}, {"in_range": False}, {"hidden": False}))
    assert bool((full >= free * (1 - 1e-6)).all())
    assert full.mean() > free.mean()
    assert full.mean() > loose.mean()


@pytest.mark.parametrize("norm", NORMS)
def test_forward_form_of_one_hidden_layer_is_the_backward_pass(norm):
    """One hidden layer: the same bounds inside, and the same lines, so that nothing is forgotten on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)).double().eval()
    x = torch.rand(30, 6, dtype=torch.float64)
    y, threat = model(x).argmax(1), KINDS[norm](0.3)
    backward, forward = (pec(model, x, y, threat, forward=f).radius for f in (False, True))
    assert 0 < int((backward > 0).sum()) < 30
    assert torch.allclose(forward, backward, atol=1e-12)


def test_forward_form_of_two_hidden_layers_by_hand():
    """m_low and m_up of the second layer no longer know that they came from the same neurons of the first."""
    first, second, last = nn.Linear(1, 2, bias=False), nn.Linear(2, 1), nn.Linear(1, 2, bias=False)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last).double().eval()
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0], [1.0]]))
        second.weight.copy_(torch.tensor([[1.0, -1.0]]))
        second.bias.fill_(1.0)
        last.weight.copy_(torch.tensor([[1.0], [0.0]]))
    x, y = torch.full((1, 1), 0.5, dtype=torch.float64), torch.tensor([0])
    threat = hf.Linf(1.0, low=-4, high=4)
    # Over [-0.5, 1.5] each neuron lies between 3/4 z and 3/4 z + 3/8. Their difference is 0, and so z_0 - z_1 = 1; the
    # affine forms only know 1 -+ 3/8. Backwards the same lines cancel to the same 1 - 3/8, as they are lines, too.
    margins = [pec(model, x, y, threat, forward=f).margin for f in (False, True)]
    assert margins[1].item() == pytest.approx(1 - 3 / 8)
    assert margins[0].item() >= margins[1].item() - 1e-12


@pytest.mark.parametrize("name", ["mlp", "smooth", "cnn", "residual"])
def test_rounding_only_ever_shrinks_the_forward_form(name):
    model, shape = tiny_nets()[name]
    x = torch.rand(10, *shape)
    y = model(x).argmax(1)
    plain, sound = (pec(model, x, y, hf.Linf(0.02), forward=True, sound=s).margin for s in (False, True))
    assert bool((sound < plain).all())
    assert torch.allclose(sound, plain, atol=2e-4)


def test_forward_form_keeps_the_contract_of_certificates():
    check_certificate("pec", threats=[hf.Linf(0.05), hf.L2(0.1), hf.L1(0.2)], forward=True)


def test_forward_form_needs_one_slope():
    model, shape = tiny_nets()["mlp"]
    with pytest.raises(hf.InputError, match="one slope"):
        hf.certify(model, torch.rand(1, *shape), torch.tensor([0]), "linf:0.1", "pec", forward=True, slopes="adaptive")


def test_the_distance_to_the_faces_rises_with_the_budget_in_places():
    """The source takes it for granted that it falls: the slopes of the lines change with the budget."""
    eps, rises = 0.02 * torch.arange(1, 41, dtype=torch.float64), 0
    for seed in range(20):
        torch.manual_seed(seed)
        layers = (nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
        model = nn.Sequential(*layers).double().eval()
        x = torch.rand(1, 4, dtype=torch.float64).expand(40, 4)
        y = model(x).argmax(1)
        ball = balls(hf.Linf(0.1, low=-9, high=9), x, eps, sound=False)
        planes = margin_planes(relaxation(trace(model, x), ball, slopes="parallel", hidden=True, sound=False), y)
        slope, shift = planes.coefficients.values, planes.shift
        other = (1 - y)[:, None]
        value = (slope @ x[:, :, None])[:, :, 0] + shift
        distance = (value.gather(1, other) / slope.abs().sum(2).gather(1, other))[:, 0]
        rises += bool((distance[1:] > distance[:-1] + 1e-9).any())
    assert rises >= 5


def test_misclassified_inputs_get_no_radius():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(10, *shape)
    wrong = (model(x).argmax(1) + 1) % 3
    result = pec(model, x, wrong, hf.Linf(0.1))
    assert bool((result.radius == 0).all())
    assert not bool(result.certified.any())
    assert bool((kw(model, x, wrong, hf.Linf(0.1)).radius == 0).all())


def test_float64_and_images():
    model, shape = tiny_nets()["cnn"]
    model = model.double()
    x = torch.rand(6, *shape).double()
    result = pec(model, x, model(x).argmax(1), hf.L2(0.3))
    assert result.radius.dtype == torch.float64
    assert result.radius.shape == (6,)
    assert bool((result.radius > 0).all())
