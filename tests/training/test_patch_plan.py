"""The plan of patch training: the strongest strategy that fits into the time."""

import pytest
import torch

import holdfast as hf
from holdfast.errors import InputError
from holdfast.training import patch_plan as module
from holdfast.training.patch_plan import STRATEGIES, plan_patch_training

COSTS = {"all": 45.0, "pool 2": 15.0, "pool 4": 11.0, "guided(10)": 3.6, "random(10)": 1.6, "random(5)": 1.0}
QUICK = {"epochs": 2, "validation": 0.9, "batch_size": 500, "budget": {"name": "constant"}}  # two steps in an epoch


def fixed_costs(monkeypatch, *, validation=0.0):
    """Replace the clock: seconds of a step by strategy."""

    def step(task, objective):
        name = next(name for name, options in STRATEGIES.items() if options.items() <= objective.items())
        return COSTS.get(name, 0.5)

    monkeypatch.setattr(module, "_step", step)
    monkeypatch.setattr(module, "_validation", lambda task: validation)


@pytest.mark.parametrize(
    ("seconds", "strategy"),
    [
        (1e4, "all"),
        (180.0, "all"),
        (179.0, "pool 2"),
        (50.0, "pool 4"),
        (15.0, "guided(10)"),
        (7.0, "random(10)"),
        (6.0, "random(5)"),
        (2.0, "random(1)"),
    ],
)
def test_the_strongest_strategy_that_fits_is_chosen(monkeypatch, seconds, strategy):
    fixed_costs(monkeypatch)
    plan = plan_patch_training("mnist-mini-patch", seconds, **QUICK)
    assert plan.strategy == strategy
    assert plan.objective["name"] == STRATEGIES[strategy]["name"]
    assert plan.seconds == plan.predicted[strategy] <= seconds
    assert plan.predicted["all"] == 4 * 45.0
    assert list(plan.predicted) == list(STRATEGIES)


def test_validation_counts(monkeypatch):
    fixed_costs(monkeypatch, validation=10.0)
    plan = plan_patch_training("mnist-mini-patch", 60.0, **QUICK)
    assert plan.strategy == "guided(10)"
    assert plan.seconds == 4 * 3.6 + 2 * 10.0


def test_too_little_time_is_refused_with_what_is_needed(monkeypatch):
    fixed_costs(monkeypatch)
    with pytest.raises(InputError, match=r"random\(1\) takes about 2 s"):
        plan_patch_training("mnist-mini-patch", 1.0, **QUICK)
    with pytest.raises(InputError, match="a plan needs a patch"):
        plan_patch_training("mnist-mini-standard", 1e3, **QUICK)


def test_the_u_net_gets_a_rate_of_its_own_beside_other_optimisers(monkeypatch):
    fixed_costs(monkeypatch)
    assert "rate" not in plan_patch_training("mnist-mini-patch", 15.0, **QUICK).objective
    muon = {"name": "muon", "lr": 0.02}
    assert plan_patch_training("mnist-mini-patch", 15.0, **QUICK, optimizer=muon).objective["rate"] == 0.05


def test_measured_times_grow_with_the_number_of_places_and_leave_the_model_alone():
    model = hf.make_model("mlp", hidden=(8,), seed=0).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = plan_patch_training("mnist-mini-patch", 1e6, model, **QUICK)
    assert plan.strategy == "all"
    assert plan.predicted["all"] > plan.predicted["random(1)"] > 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model.training
