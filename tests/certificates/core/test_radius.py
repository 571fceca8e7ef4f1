"""The search for the largest radius: exact where it can be, proved always, and cheaper with the envelope."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.core.region import balls, region
from holdfast.certificates.core.radius import _diameter, radius, search_radius
from holdfast.certificates.core.radius_search import bracket, own_radius
from holdfast.registry import methods

KINDS = {"linf": hf.Linf, "l2": hf.L2, "l1": hf.L1}
DUAL = {"linf": 1, "l2": 2, "l1": torch.inf}


def problem(name="mlp", count=24, seed=0):
    model, shape = tiny_nets()[name]
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))
    return model, x, model(x).argmax(1)


SEARCHED = [method.name for method in methods("certify") if method.radius not in (None, own_radius)]


@pytest.mark.parametrize("norm", KINDS)
@pytest.mark.parametrize("method", SEARCHED)
def test_linear_classifiers_reach_the_exact_distance(norm, method):
    model = nn.Linear(4, 3).eval()
    x = torch.rand(20, 4)
    y = model(x).argmax(1)
    gap = model.weight[y][:, None] - model.weight
    logits = model(x)
    margin = (logits.gather(1, y[:, None]) - logits).scatter(1, y[:, None], torch.inf)
    exact = (margin / torch.linalg.vector_norm(gap, DUAL[norm], dim=2)).amin(1).detach()
    found = radius(model, x, y, norm, method, low=-20, high=20, tolerance=1e-4, eps_max=4.0)
    assert bool((found <= exact).all())
    if method != "ibp" or norm == "linf":  # for other balls intervals see the enclosing box
        assert torch.allclose(found, exact, atol=2e-4)


@pytest.mark.parametrize("norm", KINDS)
@pytest.mark.parametrize("method", SEARCHED)
def test_what_is_returned_is_proved_and_holds_against_attacks(norm, method):
    model, x, y = problem(count=8)
    found = search_radius(model, x, y, norm, method, tolerance=1e-3)
    assert bool((found.radius > 0).any())
    assert bool((found.estimate >= found.radius).all())
    assert bool((found.estimate - found.radius <= 5e-4 + 1e-6).all())
    for i in found.radius.argsort(descending=True)[:6:2].tolist():
        one, label = x[i : i + 1], y[i : i + 1]
        threat = KINDS[norm](float(found.radius[i]) * (1 - 1e-6))
        if method != "pec":
            assert bool(hf.certify(model, one, label, threat, method).certified)
        assert not bool(hf.attack(model, one, label, threat, "pgd", seed=i, steps=20).success)


@pytest.mark.parametrize("norm", KINDS)
def test_the_envelope_needs_fewer_evaluations_for_the_same_answer(norm):
    model, x, y = problem(count=60)
    plain = search_radius(model, x, y, norm, "kw", eps_max=1.0)
    fast = search_radius(model, x, y, norm, "pec", eps_max=1.0)
    assert bool((plain.evaluations == math.ceil(math.log2(1.0 / 1e-4))).all())
    assert bool((fast.evaluations <= plain.evaluations).all())
    assert fast.evaluations.float().mean() < 0.75 * plain.evaluations.float().mean()
    assert bool((fast.radius >= plain.radius - 1e-4).all())


def test_two_slopes_reach_further_than_one():
    model, x, y = problem(count=40)
    one, two = (radius(model, x, y, "linf", slopes=slopes).mean() for slopes in ("parallel", "adaptive"))
    assert two > one


def test_all_or_nothing_proofs_reduce_the_search_to_bisection():
    """A synthetic proof with a known limit: the answer is the largest multiple of the step below it."""
    limit = torch.tensor([0.3, 0.71, 0.05])
    found = bracket(
        lambda x, y, eps: (torch.where(eps <= limit[y], eps, 0.0), None),
        torch.zeros(3, 1),
        torch.arange(3),
        torch.ones(3, dtype=torch.bool),
        1.0,
        2**-6,
    )
    assert torch.equal(found.radius, (limit * 64).floor() / 64)
    assert found.evaluations.tolist() == [6, 6, 6]


@given(st.integers(0, 1000), st.integers(-9, -2))
@settings(max_examples=20)
def test_a_failed_try_that_proves_something_never_costs_evaluations(seed, exponent):
    limit = torch.rand(5, generator=torch.Generator().manual_seed(seed))

    def envelope(x, y, eps):
        """Proves all up to the limit, and half of the limit or a bit more when it is tried too far."""
        return torch.where(eps <= limit[y], eps, limit[y] * (0.5 + 0.5 * limit[y] / eps)), None

    def plain(x, y, eps):
        return torch.where(eps <= limit[y], eps, 0.0), None

    x, y, right = torch.zeros(5, 1), torch.arange(5), torch.ones(5, dtype=torch.bool)
    fast, slow = (bracket(proof, x, y, right, 1.0, 2.0**exponent) for proof in (envelope, plain))
    assert bool((fast.evaluations <= slow.evaluations).all())
    for found in (fast, slow):
        assert bool((found.radius <= limit).all())
        assert bool((limit - found.radius <= 2.0**exponent).all())


@given(st.integers(0, 1000), st.sampled_from([0.3, 1.0, 4.0]), st.integers(-12, -4))
@settings(max_examples=30)
def test_margins_guide_the_search(seed, power, exponent):
    """Margins that fall to zero at the limit, straight or bent: fewer tries than bisection, at the worst one more."""
    limit = torch.rand(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def guided(x, y, eps):
        margin = (1 - eps / limit[y]).sign() * (1 - eps / limit[y]).abs().pow(power)
        return torch.where(eps <= limit[y], eps, 0.0), margin

    x, y = torch.zeros(40, 1, dtype=torch.float64), torch.arange(40)
    found = bracket(guided, x, y, torch.ones(40, dtype=torch.bool), 1.0, 2.0**exponent)
    assert bool((found.evaluations <= 1 - exponent).all())
    assert bool((found.radius <= limit).all())
    assert bool((limit - found.radius <= 2.0**exponent).all())
    if power == 1.0 and exponent <= -8:
        assert found.evaluations.double().mean() < 0.8 * -exponent


def test_tolerance_below_the_floats_still_ends():
    model, x, y = problem(count=3)
    found = search_radius(model, x, y, "linf", "ibp", tolerance=1e-30)
    assert bool((found.evaluations < 200).all())


def test_misclassified_inputs_cost_nothing_and_get_zero():
    model, x, y = problem(count=6)
    y[2] = (y[2] + 1) % 3
    found = search_radius(model, x, y, "l2")
    assert found.radius[2] == 0
    assert found.estimate[2] == 0
    assert found.evaluations[2] == 0
    assert bool((found.radius[[0, 1, 3, 4, 5]] > 0).all())


def test_the_chunk_does_not_change_the_answer():
    model, x, y = problem("cnn", count=7)
    whole, parts = (search_radius(model, x, y, "l2", chunk=chunk) for chunk in (256, 3))
    assert torch.allclose(whole.radius, parts.radius, atol=2e-4)
    assert whole.radius.shape == parts.radius.shape == (7,)


@pytest.mark.parametrize("norm", KINDS)
@pytest.mark.parametrize("sound", [False, True])
def test_balls_of_one_radius_are_the_threat_itself(norm, sound):
    x = torch.rand(4, 2, 3, 5)
    threat = KINDS[norm](0.25)
    ours, theirs = balls(threat, x, torch.full((4,), 0.25), sound=sound), region(threat, x, sound=sound)
    assert torch.allclose(ours.lower, theirs.lower, atol=1e-6)
    assert torch.allclose(ours.upper, theirs.upper, atol=1e-6)
    if sound:
        assert bool((ours.lower <= threat.box(x)[0]).all())
        assert bool((ours.upper >= threat.box(x)[1]).all())
    assert ours.threat == theirs.threat


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "l_inf"}, "unknown norm 'l_inf'.*Did you mean 'linf'"),
        ({"method": "fast-lin"}, "unknown method 'fast-lin'.*Did you mean 'fastlin'"),
        ({"tolerance": 0.0}, "'tolerance'.*expected a number > 0, got 0.0"),
        ({"eps_max": -1.0}, "'eps_max'.*expected a number > 0, got -1.0"),
        ({"chunk": 0}, "'chunk'.*expected an integer >= 1, got 0"),
        ({"low": 0.5}, "outside the valid range"),
    ],
)
def test_bad_options_are_refused(options, message):
    model, x, y = problem(count=4)
    with pytest.raises(hf.InputError, match=message):
        radius(model, x, y, **{"norm": "linf", **options})


def test_what_a_failed_ball_still_proves_raises_the_lower_end_of_the_bracket():
    """0.5 fails and proves 0.4: a bracket of 0.1, closed after one evaluation at a tolerance of 0.2."""

    def prove(x, y, eps):
        return torch.where(eps <= 0.45, eps, torch.full_like(eps, 0.4)), None

    x, y = torch.zeros(2, 1), torch.tensor([0, 0])
    found = bracket(prove, x, y, torch.tensor([True, False]), 1.0, 0.2)
    assert found.radius.tolist() == pytest.approx([0.4, 0.0])
    assert found.evaluations.tolist() == [1, 0]  # a misclassified input has radius 0 without any
    closer = bracket(prove, x[:1], y[:1], torch.tensor([True]), 1.0, 1e-4)
    assert 0.45 - 1e-4 <= float(closer.radius) <= 0.45


def test_the_search_begins_with_the_largest_distance_of_two_valid_inputs():
    x = torch.zeros(1, 3, 3)
    assert [_diameter(x, threat) for threat in (hf.Linf(0.0, low=-1.0), hf.L2(0.0), hf.L1(0.0))] == [2.0, 3.0, 9.0]
