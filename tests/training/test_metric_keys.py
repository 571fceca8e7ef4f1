"""Every step of a certified objective has the same metrics, with or without a budget: the history takes their means."""

from functools import partial

import pytest
import torch
from torch import nn

import holdfast as hf
from contexts import make_context
from holdfast.models.zoo.centroid import Centroid, CentroidNet
from holdfast.registry import Objective, get, methods
from holdfast.threats import L2, Linf, Patch, Sparse
from holdfast.training.context import Parts
from holdfast.training.regularizers.ibp_warmup import ibp_warmup
from holdfast.training.regularizers.relu_stability import relu_stability
from holdfast.training.schedules import with_budget

THREATS = {"linf": Linf(0.05), "l2": L2(0.1), "patch": Patch(2, 2), "sparse": Sparse(1)}
CERTIFIED = [method for method in methods("train") if isinstance(method, Objective) and method.certificate]
BOUNDS = Parts(regularizers={"ibp-warmup": ibp_warmup, "relu-stability": partial(relu_stability, weight=1e-3)})


def problem(method):
    """A model that the objective takes, and images with the labels that it predicts for most of them."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 6)).double()
    model = (
        CentroidNet(body, Centroid(3, 6).double()) if get("certify", method.certificate).needs == "centroid" else body
    )
    x = torch.rand(8, 1, 8, 8, dtype=torch.float64)
    y = model(x).argmax(1)
    y[0] = (y[0] + 1) % 3
    return model.train(), x, y


@pytest.mark.parametrize("method", CERTIFIED, ids=lambda method: method.name)
def test_the_metrics_are_the_same_without_a_budget(method):
    model, x, y = problem(method)
    threat = THREATS[method.threats[0]]
    parts = BOUNDS if "regularizers" in method.takes else Parts()
    metrics = {}
    for ramp in (0.0, 0.5, 1.0):
        adversary = threat if method.ramps else with_budget(threat, ramp)
        metrics[ramp] = method.function(model, x, y, make_context(x, adversary, parts, ramp=ramp))[1]
    assert metrics[0.0].keys() == metrics[0.5].keys() == metrics[1.0].keys()
    assert float(metrics[0.0]["accuracy"]) == pytest.approx(7 / 8)
    if "verified" in metrics[0.0]:
        assert float(metrics[0.0]["verified"]) == pytest.approx(7 / 8)


@pytest.mark.parametrize("name", ["per", "per-at"])
def test_the_means_of_an_epoch_in_which_the_budget_starts_to_rise(name, toy_recipe, toy_data):
    """At a budget this small, all that is classified right is verified, in every step."""
    toy_recipe |= {"threat": "linf:1e-7", "objective": {"name": name}, "epochs": 1, "attack": None}
    toy_recipe |= {"budget": {"name": "linear", "start": 0.5, "end": 1}, "evaluate": {"attack_steps": 0}}
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
    row = hf.train(toy_recipe, model, toy_data, progress=False).history[0]
    assert 0 < row["train_verified"] == pytest.approx(row["train_accuracy"])
