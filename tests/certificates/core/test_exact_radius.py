"""The exact radius: proofs from below and counter-examples from above meet, and what is returned was proved."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.nearest import nearest
from holdfast.certificates.core import exact_radius
from holdfast.certificates.core.radius import search_radius
from holdfast.errors import SoundnessError
from holdfast.registry import get
from holdfast.results import CertifyResult

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    for layer in (model[0], model[2]):
        layer.weight.data.mul_(2.0)
    x = torch.rand(2, 5)
    with torch.no_grad():
        model[4].bias -= model(x).mean(0)
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
def test_a_linear_model_has_the_radius_of_the_closed_form(norm, dual):
    torch.manual_seed(0)
    model = nn.Linear(6, 2).eval()
    x = 0.4 + 0.2 * torch.rand(3, 6)  # so that the valid range does not cut the balls
    with torch.no_grad():
        z = model(x)
        model.bias[0] -= (z[:, 0] - z[:, 1]).mean()
        z, y = model(x), model(x).argmax(1)
    truth = (z[:, 0] - z[:, 1]).abs() / torch.linalg.vector_norm(model.weight[0] - model.weight[1], dual)
    assert bool((truth < 0.3).all()), "choose inputs near the boundary"
    found = search_radius(model, x, y, norm, "beta-crown", tolerance=TOLERANCE)
    assert bool((found.radius <= truth).all())
    assert bool((found.radius >= truth - 1.1 * TOLERANCE).all())
    assert bool((found.broken >= truth * (1 - 1e-5)).all())
    assert bool(found.exact(TOLERANCE).all())
    assert torch.equal(hf.radius(model, x, y, norm, "beta-crown", tolerance=TOLERANCE), found.radius)


def test_it_is_the_radius_at_which_the_exact_program_changes_its_mind(small):
    model, x, y = small
    found = search_radius(model, x, y, "linf", "beta-crown", tolerance=TOLERANCE)
    assert bool(found.exact(TOLERANCE).all())
    assert bool((found.radius > hf.radius(model, x, y, "linf", "crown", tolerance=TOLERANCE)).any())
    for i in range(len(x)):
        one = (model, x[i : i + 1], y[i : i + 1])
        assert bool(hf.certify(*one, hf.Linf(float(found.radius[i])), "milp").certified)
        assert not bool(hf.certify(*one, hf.Linf(float(found.broken[i]) + 1e-5), "milp").certified)


def test_a_misclassified_input_has_the_radius_zero(small):
    model, x, y = small
    found = search_radius(model, x, (y + 1) % 3, "linf", "beta-crown")
    assert found.radius.tolist() == found.broken.tolist() == [0.0] * len(x)
    assert bool(found.exact(0.0).all())


def test_a_constant_model_holds_in_the_whole_range():
    model = nn.Linear(2, 2).eval()
    model.weight.data.zero_()
    model.bias.data = torch.tensor([1.0, 0.0])
    found = search_radius(model, torch.rand(1, 2), torch.tensor([0]), "linf", "beta-crown")
    assert found.radius.tolist() == [1.0]
    assert math.isinf(float(found.broken))
    assert not bool(found.exact(1e-3))


def played(decisions):
    """`beta-crown` with a function that answers as `decisions` (radius -> proved, broken or None) says."""

    def function(model, x, y, threat, **options):
        verdict = decisions(threat.eps)
        seen.append((threat.eps, verdict))
        x_adv = (x + 0.999 * threat.eps).clamp(max=1.0) if verdict == "broken" else x
        return CertifyResult(torch.tensor([verdict == "proved"]), torch.zeros(1), x_adv=x_adv)

    seen = []
    return replace(get("certify", "beta-crown"), function=function), seen


def ask(monkeypatch, decisions, **options):
    """The radius of the input 0 of a model that says 1 from 0.3 on."""
    model = nn.Linear(1, 2).eval()
    model.weight.data, model.bias.data = torch.tensor([[0.0], [1.0]]), torch.tensor([0.3, 0.0])
    record, seen = played(decisions)
    monkeypatch.setattr("holdfast.certificates.core.radius.radius_method", lambda name: record)
    far = replace(nearest(model, torch.zeros(1, 1), torch.tensor([0]), "linf"), distance=torch.tensor([math.inf]))
    monkeypatch.setattr(exact_radius, "nearest", lambda *given, **how: far)
    how = {"tolerance": 1e-3, **options}
    return search_radius(model, torch.zeros(1, 1), torch.tensor([0]), "linf", "beta-crown", **how), seen


def test_without_a_verdict_proofs_are_sought_below_and_nothing_counts_as_broken(monkeypatch):
    found, seen = ask(monkeypatch, lambda eps: "proved" if eps <= 0.1 else None)
    assert 0.099 <= float(found.radius) <= 0.1
    assert float(found.radius) == max(eps for eps, verdict in seen if verdict == "proved")
    assert math.isinf(float(found.broken))
    assert not bool(found.exact(1e-3))


def test_an_example_lowers_the_upper_end_to_its_own_distance(monkeypatch):
    found, seen = ask(monkeypatch, lambda eps: "proved" if eps <= 0.2 else "broken" if eps > 0.35 else None)
    assert 0.199 <= float(found.radius) <= 0.2
    assert float(found.broken) == pytest.approx(0.3, abs=1e-4), "the way back to the input was cut"
    assert seen[1][0] == pytest.approx(0.15, abs=1e-3), "the middle of what is left"


def test_an_example_below_a_proof_is_a_bug(monkeypatch):
    answers = iter(["broken", "proved", "broken"])
    monkeypatch.setattr(exact_radius, "_nearer", lambda q, x, x_adv, y: x_adv if float(x_adv) > 0.8 else 0.01 + 0 * x)
    with pytest.raises(SoundnessError, match=r"proves the radius .* and finds an example of size 0\.01"):
        ask(monkeypatch, lambda eps: next(answers))


def test_options_of_the_search_are_checked(small):
    with pytest.raises(hf.InputError, match="time_limit"):
        hf.radius(*small, "linf", "beta-crown", time_limit=0.0)
    with pytest.raises(hf.InputError, match="'crown' has no option 'time_limit'"):
        hf.radius(*small, "linf", "crown", time_limit=1.0)
