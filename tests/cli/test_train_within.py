"""`holdfast train --within`: the places that a patch recipe trains on follow from the time."""

import tomllib
from pathlib import Path

from holdfast.cli import train as command
from holdfast.training.patch_plan import PatchPlan

TINY = ("epochs=1", "validation=0.99", "batch_size=50", "budget.start=0", "budget.end=1", "evaluate.count=2")


def test_the_chosen_strategy_is_the_objective_of_the_run(holdfast, monkeypatch):
    asked = []

    def plan(recipe, seconds, model, data, **overrides):
        asked.append((recipe, seconds, overrides["epochs"]))
        return PatchPlan("random(1)", {"name": "patch", "places": 1}, 3.0, {"all": 90.0, "random(1)": 3.0})

    monkeypatch.setattr(command, "plan_patch_training", plan)
    options = [part for setting in TINY for part in ("--set", setting)]
    code, out, err = holdfast("train", "mnist-mini-patch", "--within", "20", "--out", "run", *options)
    assert code == 0, err
    assert asked == [("mnist-mini-patch", 20.0, 1)]
    assert "places: random(1), about 3 s; all 90, random(1) 3" in out
    assert tomllib.loads(Path("run/recipe.toml").read_text())["objective"] == {
        "name": "patch",
        "places": 1,
        "pool": 1,
        "pool_again": 1,
    }


def test_too_little_time_is_refused_before_training(refused):
    options = [part for setting in TINY for part in ("--set", setting)]
    message = refused("train", "mnist-mini-patch", "--within", "1e-6", "--out", "run", *options)
    assert "no strategy against 'patch:2x2' fits into 1e-06 s" in message
    assert not Path("run").exists()
    assert "leave it out with --resume" in refused("train", "mnist-mini-patch", "--within", "9", "--resume")
