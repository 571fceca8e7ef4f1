"""The collapse that single-step training is prone to, and the runs that are watched for it."""

import warnings

import pytest

from holdfast.registry import Objective, get, methods
from holdfast.training import load_recipe, loop, train
from holdfast.training.collapse import CollapseWarning, collapsed, warn_of_collapse


@pytest.mark.parametrize(
    ("single", "robust", "before", "expected"),
    [
        (0.9, 0.02, [0.3, 0.45, 0.4], True),
        (0.52, 0.2, [0.4], True),  # half of the best is enough
        (0.52, 0.21, [0.4], False),  # and a little above it is not
        (0.5, 0.2, [0.4], False),  # a gap of 0.3 is not more than 0.3
        (0.9, 0.02, [], False),  # nothing to fall from
        (0.1, 0.0, [0.5], False),  # bad, but not single-step training gone wrong
        (0.55, 0.45, [0.46], False),
    ],
)
def test_detector_on_single_epochs(single, robust, before, expected):
    assert collapsed(single, robust, before) is expected


LOG = [(0.4, 0.3), (0.5, 0.38), (0.55, 0.4), (0.9, 0.01), (0.95, 0.0), (0.5, 0.35)]


def test_detector_on_a_log_warns_once():
    history = []
    for epoch, (single, robust) in enumerate(LOG, 1):
        row = {"epoch": epoch, "validation_single": single, "validation_robust": robust}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row["collapsed"] = warn_of_collapse(row, history)
        assert len(caught) == (1 if epoch == 4 else 0)
        history.append(row)
    assert [row["collapsed"] for row in history] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_a_run_that_collapses_says_so_once_and_keeps_the_column(toy_recipe, make_toy_model, toy_data, monkeypatch):
    log = iter(LOG)

    def evaluate(*arguments, single_step, **options):
        assert single_step
        single, robust = next(log)
        return {"clean": 0.9, "robust": robust, "single": single}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    toy_recipe |= {"attack": {"name": "fgsm-rs"}, "epochs": 6}
    with pytest.warns(CollapseWarning, match=r"in epoch 4: accuracy under one step 90\.0%, under PGD 1\.0%") as caught:
        result = train(toy_recipe, make_toy_model(), toy_data)
    assert len(caught) == 1
    assert [row["collapsed"] for row in result.history] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert [row["validation_single"] for row in result.history] == [single for single, _ in LOG]


SINGLE = [method for method in methods("train") if method.single_step]


@pytest.mark.parametrize("method", [*SINGLE, get("train", "pgd")], ids=lambda method: method.name)
def test_which_runs_are_watched(toy_recipe, make_toy_model, toy_data, method):
    parts = {"objective": {"name": "at"}, "attack": {"name": method.name}}
    if isinstance(method, Objective):
        parts = {"objective": {"name": method.name}, "attack": None}
    recipe = {**toy_recipe, **parts, "epochs": 1}
    assert load_recipe(recipe).single_step == method.single_step
    (row,) = train(recipe, make_toy_model(), toy_data).history
    assert ("collapsed" in row) == ("validation_single" in row) == method.single_step
    if method.single_step:
        assert row["collapsed"] == 0.0
        assert row["validation_robust"] <= row["validation_clean"]
        assert row["validation_single"] <= row["validation_clean"]
