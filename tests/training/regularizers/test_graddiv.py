"""GradDiv: the penalty by hand, gradients of second order, the schedule, and what it does to a toy problem."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.attacks.core.chance import seeded
from holdfast.models import adv_bnn
from holdfast.training.context import Parts
from holdfast.training.objectives.adv_bnn import adv_bnn as adv_bnn_objective
from holdfast.training.objectives.rse import rse
from holdfast.training.objectives.standard import standard
from holdfast.training.regularizers.graddiv import graddiv_dpp, graddiv_kappa, graddiv_mean, ramp
from holdfast.utils.directions import r_dpp, r_kappa, r_max, r_mean, r_smoothmax, unit

FULL = {"warm_up": 0.0, "ramp_up": 0.0}
FORMS = {
    "kappa": (graddiv_kappa, {}, r_kappa),
    "thesis": (graddiv_kappa, {"formula": "thesis"}, partial(r_kappa, formula="thesis")),
    "mean": (graddiv_mean, {}, r_mean),
    "max": (graddiv_mean, {"form": "max"}, r_max),
    "smoothmax": (graddiv_mean, {"form": "smoothmax"}, r_smoothmax),
    "dpp": (graddiv_dpp, {"jitter": 1e-9}, r_dpp),
}


def network(activation=nn.Tanh, std=0.3):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3)).double()
    return adv_bnn(plain, prior_std=std)


def batch():
    torch.manual_seed(2)
    return torch.rand(6, 4, dtype=torch.float64), torch.arange(6) % 3


def penalty(model, x, y, regularizer, **options):
    """The penalty alone, with draws that a seed fixes: the loss with it minus the loss without."""
    parts = Parts(regularizers={"graddiv": partial(regularizer, **FULL | options)})
    with seeded(0, x.device):
        loss, metrics = standard(model, x, y, make_context(x, None, parts))
    with seeded(0, x.device):
        return loss - standard(model, x, y, make_context(x))[0], metrics


@pytest.mark.parametrize("form", FORMS)
def test_the_penalty_is_the_mean_of_the_measure_over_fresh_draws(form):
    regularizer, options, measure = FORMS[form]
    model, (x, y) = network(), batch()
    found, metrics = penalty(model, x, y, regularizer, weight=0.7, **options)
    with seeded(0, x.device):
        model(x)  # the draw of the loss itself
        gradients = []
        for _ in range(3):
            point = x.clone().requires_grad_(True)
            cross_entropy(model(point), y, reduction="sum").backward()
            gradients.append(point.grad)
    expected = measure(unit(torch.stack(gradients, 1))).mean().item()
    assert found.item() == pytest.approx(0.7 * expected, rel=1e-5)
    assert metrics["graddiv_value"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("form", ["kappa", "mean", "dpp"])
def test_gradients_are_those_of_finite_differences(form, activation):
    regularizer, options, _ = FORMS[form]
    model, (x, y) = network(activation), batch()
    weights = [model.network[0].layer.weight, model.network[0].log_std["weight"], model.network[2].layer.weight]
    gradients = torch.autograd.grad(penalty(model, x, y, regularizer, **options)[0], weights)
    assert all(float(gradient.abs().max()) > 1e-6 for gradient in gradients)
    for weight, gradient in zip(weights, gradients, strict=True):
        for place in ((0, 1), (2, 3)):
            values = []
            for shift in (1e-6, -2e-6, 1e-6):
                with torch.no_grad():
                    weight[place] += shift
                values.append(penalty(model, x, y, regularizer, **options)[0].item())
            assert gradient[place].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-3, abs=1e-7)


def test_the_point_is_adversarial_for_adv_bnn_and_clean_on_request():
    model, (x, y) = network(), batch()
    threat = hf.Linf(0.3)
    values = {}
    for at in ("loss", "clean"):
        parts = Parts(regularizers={"graddiv": partial(graddiv_mean, **FULL, at=at)})
        with seeded(0, x.device):
            values[at] = adv_bnn_objective(model, x, y, make_context(x, threat, parts))[1]["graddiv_value"].item()
        parts = Parts(regularizers={"graddiv": partial(graddiv_mean, **FULL, at=at)})
        with seeded(0, x.device):
            values["rse", at] = rse(model, x, y, make_context(x, None, parts))[1]["graddiv_value"].item()
    assert values["loss"] != values["clean"]
    assert values["rse", "loss"] == values["rse", "clean"]


def test_the_weight_rises_after_the_warm_up():
    table = {0.0: 0, 0.049: 0, 0.05: 0, 0.15: 0.5, 0.25: 1, 0.9: 1}
    assert {p: round(ramp(p, 0.05, 0.2), 9) for p in table} == table
    assert [ramp(p, 0.5, 0.0) for p in (0.4, 0.5)] == [0, 1]
    model, (x, y) = network(), batch()
    parts = Parts(regularizers={"graddiv": partial(graddiv_mean, warm_up=0.2, ramp_up=0.4)})
    with seeded(0, x.device):
        before = standard(model, x, y, make_context(x, None, parts, progress=0.1))[0]
    with seeded(0, x.device):
        assert before.item() == standard(model, x, y, make_context(x))[0].item()


def test_it_spreads_the_gradients_of_a_toy_problem():
    x, y = batch()
    reached = {}
    for weight in (0.0, 3.0):
        model = network(std=0.5)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        parts = Parts(regularizers={"graddiv": partial(graddiv_mean, **FULL, weight=weight)})
        with seeded(1, x.device):
            for _ in range(60):
                optimizer.zero_grad()
                standard(model, x, y, make_context(x, None, parts))[0].backward()
                optimizer.step()
        reached[weight] = penalty(model, x, y, graddiv_mean, weight=1.0, samples=30)[0].item()
    assert reached[3.0] < reached[0.0] - 0.2


def test_deterministic_models_few_draws_and_too_many_are_refused():
    recipe = {"epochs": 1, "objective": {"name": "rse"}, "optimizer": {"lr": 0.1, "name": "adam"}, "data": "two-moons"}
    plain = {"name": "mlp", "hidden": [4]}
    with pytest.raises(hf.InputError, match="does not draw random numbers"):
        hf.train({**recipe, "model": plain, "regularizers": {"graddiv-mean": {}}}, progress=False)
    random = {"name": "rse", "of": "mlp", "hidden": [4]}
    with pytest.raises(hf.InputError, match="samples: expected an integer >= 2"):
        hf.train({**recipe, "model": random, "regularizers": {"graddiv-mean": {"samples": 1}}}, progress=False)
    with pytest.raises(hf.InputError, match="3 gradients of 2 values span no volume"):
        hf.train({**recipe, "model": random, "regularizers": {"graddiv-dpp": {}}}, progress=False)
    assert math.isfinite(ramp(0.3, 0.0, 1.0))
