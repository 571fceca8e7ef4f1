"""Rounding around one input: tighter than everywhere, and still more than what floating point does."""

from importlib import import_module

import pytest
import torch
from nets import lipschitz_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.certificates.core.lipschitz_margins import certify_logits, lipschitz_constants
from holdfast.certificates.core.logit_error import Rounding
from holdfast.certificates.models.gloro import GloRo
from holdfast.errors import UnsupportedError
from holdfast.models.layers import MinMax


def networks():
    torch.manual_seed(3)
    ends = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), MinMax()).eval()  # no dense layer at its end
    for name, (model, shape) in {"ends": (ends, (6,)), **lipschitz_nets()}.items():
        try:
            graph = trace(model, torch.rand(1, *shape))
            yield name, model, shape, Rounding(graph, lipschitz_bound(graph), torch.float32)
        except UnsupportedError:
            continue


NETWORKS = {name: (model, shape, rounding) for name, model, shape, rounding in networks()}


def off(model, x, y):
    """What rounding does to z_y - z_i, (B, K): float32 against float64."""
    with torch.no_grad():
        single, exact = model(x).double(), model.double()(x.double())
        model.float()
    error = single - exact
    return (error.gather(1, y[:, None]) - error).abs()


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("name", NETWORKS)
def test_rounding_around_an_input_is_within_its_bound(name, eps):
    model, shape, rounding = NETWORKS[name]
    torch.manual_seed(0)
    x = torch.cat([torch.rand(100, *shape), torch.rand(100, *shape).round(), torch.zeros(1, *shape)])
    with torch.no_grad():
        y = torch.arange(len(x)) % model(x).shape[1]
    move = torch.randn_like(x)
    move = eps * move / move.flatten(1).norm(dim=1).view(-1, *[1] * len(shape))
    bound = rounding.around(x, y, eps * (1 + 1e-6))
    assert bool((off(model, x, y) + off(model, x + move, y) <= bound).all())
    offset, slope = rounding.everywhere()
    distance = (x.double() - rounding.centre.double()).flatten(1).norm(dim=1)[:, None]
    widest = 2 * (offset[y] + slope[y] * distance) + slope[y] * eps
    assert bool((bound <= widest * (1 + 1e-5)).all())
    if eps == 0 and name != "linear":  # which has no hidden values
        assert float((bound / widest).mean()) < 0.95, float((bound / widest).mean())  # of use


def judged(model, x, y, threat):
    """Verdicts without rounding, with rounding everywhere, and after the second look."""
    with torch.no_grad():
        logits = model(x)
        first = certify_logits(logits, x, y, threat, lipschitz_constants(model, x), "gloro", sound=True)
    exact = hf.certify(model, x, y, threat, "gloro", sound=False)
    return exact, first, hf.certify(model, x, y, threat, "gloro")


@pytest.mark.parametrize("name", ["liresnet", "cnn", "ends"])
def test_inputs_that_fail_by_rounding_alone_are_proved_after_a_second_look(name):
    model, shape, _ = NETWORKS[name]
    x = torch.rand(100, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = model(x).argmax(1)
    radius, sharp = (hf.certify(model, x, y, hf.L2(0.0), "gloro", sound=s).radius for s in (True, False))
    proved = 0
    for i in (radius > 0).nonzero()[:30, 0].tolist():
        threat = hf.L2(float(radius[i] + 0.3 * (sharp[i] - radius[i])))
        exact, first, second = judged(model, x[i : i + 1], y[i : i + 1], threat)
        assert bool(exact.certified)
        assert not bool(first.certified)
        if bool(second.certified):
            proved += 1
            assert second.by == ("gloro",)
            assert float(second.radius) >= float(torch.tensor(threat.eps)) * (1 - 1e-6)
            assert float(second.margin) > 0
    assert proved >= 15


def test_a_second_look_takes_nothing_back_and_proves_nothing_beyond_the_constants():
    model, shape, _ = NETWORKS["liresnet"]
    x = torch.rand(300, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(300) % 3
    for eps in (0.0, 1e-4, 1e-2, 0.1):
        exact, first, second = judged(model, x, y, hf.L2(eps))
        assert bool((first.certified <= second.certified).all())
        assert bool((second.certified <= exact.certified).all())
        assert bool((second.margin >= first.margin).all())
        assert bool((second.radius >= first.radius).all())
        assert bool((second.certified == (second.margin > 0)).all())
        assert [by == "gloro" for by in second.by] == second.certified.tolist()


def test_the_model_with_the_extra_class_agrees():
    model, shape, _ = NETWORKS["normalised"]
    x = torch.rand(200, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = model(x).argmax(1)
        threat = hf.L2(float(hf.certify(model, x, y, hf.L2(0.0), "gloro").radius.median()))
        answered = GloRo(model, threat).eval()(x).argmax(1) == y
    assert torch.equal(answered, hf.certify(model, x, y, threat, "gloro").certified)


def test_values_that_are_not_finite_prove_nothing():
    graph = trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).eval(), torch.rand(1, 2))
    rounding = Rounding(graph, lipschitz_bound(graph), torch.float32)
    bad = rounding.around(torch.full((1, 2), torch.nan), torch.zeros(1, dtype=torch.long), 0.1)
    assert not bool((bad < torch.inf).any())


def test_norms_are_computed_once(monkeypatch):
    model, shape, _ = NETWORKS["pooled"]
    x, y = torch.rand(4, *shape), torch.zeros(4, dtype=torch.long)
    graph = trace(model, x)
    rounding, calls = Rounding(graph, lipschitz_bound(graph), torch.float32), []
    monkeypatch.setattr(
        import_module("holdfast.certificates.core.logit_error"), "norm_bound", lambda *a, **k: calls.append(a)
    )
    rounding.around(x, y, 0.1)
    rounding.everywhere()
    assert calls == []
