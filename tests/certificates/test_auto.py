"""From cheap to tight: which certificate decides which input, and that nothing is lost on the way."""

from importlib import import_module

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.errors import UnsupportedError
from holdfast.models.layers import MinMax
from holdfast.registry import get

auto = import_module("holdfast.certificates.auto")  # holdfast.certificates itself is the function


@pytest.fixture(scope="module")
def contracting():
    """A network with small constants, and inputs from clear to close."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), MinMax(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    for layer in (model[0], model[2]):
        nn.init.orthogonal_(layer.weight)
    x = torch.rand(60, 6)
    with torch.no_grad():
        model[4].bias -= model(x).median(0).values  # so that no class has all inputs
        return model, x, model(x).argmax(1)


def climb(model, x, y, threat):
    """What `auto` was without Lipschitz constants."""
    best = hf.certify(model, x, y, threat, "ibp").certified
    for name in ("crown-ibp", "alpha-crown"):
        best |= hf.certify(model, x, y, threat, name).certified
    return best


def test_constants_decide_what_is_easy(contracting):
    model, x, y = contracting
    threat = hf.L2(0.02)
    result = hf.certify(model, x, y, threat)
    easy = hf.certify(model, x, y, threat, "gloro").certified
    assert int(easy.sum()) > 20
    assert [name == "gloro" for name in result.by] == easy.tolist()
    assert {name for name, done in zip(result.by, easy.tolist(), strict=True) if done} == {"gloro"}
    assert bool((result.certified | ~easy).all())
    assert result.radius is None


@pytest.mark.parametrize("eps", [0.01, 0.1, 0.3])
def test_no_certificate_is_lost(contracting, eps):
    model, x, y = contracting
    wrong = y.clone()
    wrong[:10] = (y[:10] + 1) % 3
    threat = hf.L2(eps)
    result = hf.certify(model, x, wrong, threat)
    assert bool((result.certified | ~climb(model, x, wrong, threat)).all())
    assert not bool(result.certified[:10].any())
    assert bool((result.margin[:10] <= 0).all())
    assert bool(result.margin.isfinite().all())
    broken = (result.x_adv != x).flatten(1).any(1)
    assert [bool(name) for name in result.by] == (result.certified | broken).tolist()
    assert bool((result.certified == (result.margin > 0)).all())
    assert not bool((hf.attack(model, x, wrong, threat, "pgd", steps=10).success & result.certified).any())


def test_balls_and_boxes_come_between(contracting):
    model, x, y = contracting
    names = {name for eps in (0.02, 0.05, 0.1, 0.15, 0.2) for name in hf.certify(model, x, y, hf.L2(eps)).by}
    assert {"gloro", "bcp"} <= names
    assert names & {"crown-ibp", "alpha-crown"}


@pytest.mark.parametrize("refused", ["gloro", "bcp"])
def test_networks_without_constants_go_on_without_them(monkeypatch, contracting, refused):
    model, x, y = contracting

    def refuse(*args, **options):
        raise UnsupportedError("no constant")

    monkeypatch.setattr(auto, refused, refuse)
    result = hf.certify(model, x, y, hf.L2(0.02))
    assert refused not in result.by
    assert ("gloro" in result.by) == (refused == "bcp")
    assert bool((result.certified | ~climb(model, x, y, hf.L2(0.02))).all())


def test_other_threats_do_not_ask_for_constants(monkeypatch):
    monkeypatch.setattr(auto, "gloro", None)
    monkeypatch.setattr(auto, "bcp", None)
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(8, *shape)
    for threat in (hf.Linf(0.005), hf.L1(0.005)):
        result = hf.certify(model, x, model(x).argmax(1), threat)
        assert bool(result.certified.any())
        assert set(result.by) <= {"ibp", "crown-ibp", "alpha-crown", "beta-crown", "milp", "pgd", ""}


def test_layers_that_nothing_covers_are_refused_as_before():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).eval()
    x = torch.rand(2, 4)
    with pytest.raises(UnsupportedError, match="layer '1'"):
        hf.certify(model, x, model(x).argmax(1), hf.L2(0.1))


@pytest.mark.parametrize("count", [1, 5])
def test_logits_at_hand_change_nothing(contracting, count):
    model, x, y = contracting
    x, y = x[:count], y[:count]
    with torch.no_grad():
        ours, theirs = (auto.auto(model, x, y, hf.L2(0.05), logits=logits) for logits in (None, model(x)))
    assert torch.equal(ours.margin, theirs.margin)
    assert ours.by == theirs.by


def hard_task(inputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)).eval()
    for layer in (model[0], model[2], model[4]):
        layer.weight.data.mul_(2.5)
    x = torch.rand(12, inputs)
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize(("inputs", "first"), [(4, "input-split"), (14, "beta-crown")])
def test_a_complete_search_decides_what_alpha_crown_leaves_open(inputs, first):
    """Input splitting for few inputs, else branch and bound; the verdicts are those of the exact program."""
    (model, x, y), threat = hard_task(inputs), hf.Linf(0.2 if inputs == 4 else 0.12)
    without, more = hf.certify(model, x, y, threat, time_limit=0.0), hf.certify(model, x, y, threat, time_limit=10.0)
    exact = import_module("holdfast.certificates.complete.milp").exact_margin(model, x, y, threat)
    assert torch.equal(more.certified, exact.margin > exact.slack)
    assert bool((without.certified <= more.certified).all())
    assert first in more.by
    assert not {"input-split", "beta-crown", "milp"} & set(without.by)
    assert bool((more.margin >= without.margin).all())
    broken = model(more.x_adv).argmax(1) != y
    assert torch.equal(broken, ~more.certified), "what is not proved is broken"
    assert bool(threat.contains(more.x_adv, x).all())
    assert [bool(name) for name in more.by] == (more.certified | broken).tolist()


def test_the_inputs_nearest_to_a_proof_come_first(monkeypatch):
    model, x, y = hard_task(14)
    before = hf.certify(model, x, y, hf.Linf(0.12), time_limit=0.0)
    entry, seen = auto.get("certify", "beta-crown"), []

    def spy(model, x, y, threat, *, time_limit):
        seen.append(x)
        return entry.function(model, x, y, threat, time_limit=time_limit)

    records = {"beta-crown": type("Record", (), {"function": staticmethod(spy), "threats": entry.threats})}
    monkeypatch.setattr(auto, "get", lambda kind, name: records.get(name, get(kind, name)))
    hf.certify(model, x, y, hf.Linf(0.12), time_limit=10.0)
    (given,) = seen
    margins = [float(before.margin[(x == one).all(1)]) for one in given]
    assert len(margins) > 1, "choose a task with several open inputs"
    assert margins == sorted(margins, reverse=True)
