"""Recipes and checkpoints that somebody else wrote: an error of ours that says what is wrong, soon."""

import shutil
from pathlib import Path

import pytest
import torch

from clock import within
from holdfast import train
from holdfast.errors import HoldfastError, InputError, StorageError
from holdfast.training import folder as files
from holdfast.training.recipe.recipe import load_recipe, to_table

SOON = 10.0
VALUES = [
    *(0, -1, 10**18, 10**400, 1e308, float("nan"), float("inf"), -0.5, "", "x" * 1000, True, [], [[]], [1] * 5000, {}),
    *({"a": 1}, {"name": "x"}, {"name": []}, "linf:1/0", "linf:nan", "linf:1e999", "patch:999999999x999999999"),
]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs = " + "[" * 2000 + "]" * 2000, "nested deeper"),
        ("epochs = " + "{a = " * 2000 + "1" + "}" * 2000, "nested deeper"),
        (".".join("a" * 1000) + " = 1", "nested deeper"),
        ("[" + ".".join("a" * 1000) + "]", "nested deeper"),
        ("epochs = 1" + "0" * 30, "more than 64 bits"),
        ("epochs = " + "1" * 10_000, "digits"),
        ("epochs = 1\nepochs = 2", "Cannot overwrite"),
        ("epochs = 1979-05-27", "it holds a date"),
        ("# " + "x" * 40_000, "more than 32,768 bytes"),
        (".".join("a" * 200_000) + " = 1", "more than 32,768 bytes"),
    ],
)
def test_recipes_that_are_none(tmp_path, text, words):
    path = write(tmp_path / "recipe.toml", text)
    with within(SOON), pytest.raises(InputError, match=words):
        load_recipe(path)


@pytest.mark.parametrize("name", ["mnist-mini-at", "mnist-mini-gloro", "mnist-mini-relu-stability"])
def test_hostile_values_of_a_recipe_are_refused_or_valid(name):
    table = to_table(load_recipe(name))
    places = [(key,) for key in table]
    places += [(key, inner) for key, part in table.items() if isinstance(part, dict) for inner in part]
    refused = 0
    for place in places:
        for value in VALUES:
            changed = {key: dict(part) if isinstance(part, dict) else part for key, part in table.items()}
            (changed if len(place) == 1 else changed[place[0]])[place[-1]] = value
            with within(SOON):
                try:
                    load_recipe(changed)
                except HoldfastError:
                    refused += 1
    assert refused > 0.5 * len(places) * len(VALUES)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "ensemble", "members": 10**9}, "at most 20,000"),
        ({"name": "mlp", "hidden": [1] * 30_000}, "at most 20,000"),
        ({"name": "mlp", "hidden": [10**9, 10**9]}, "values; at most"),
        ({"name": "mlp", "hidden": [[1]]}, r"expected an integer >= 1, got \[1\]"),
        ({"name": "mlp", "depth": 3}, "has no option 'depth'"),
    ],
)
def test_a_recipe_cannot_ask_for_a_model_without_end(toy_data, toy_recipe, model, words):
    with within(30), pytest.raises(InputError, match=words):
        train({**toy_recipe, "model": model}, data=toy_data, progress=False)


@pytest.fixture
def run(tmp_path, toy_data, toy_recipe, make_toy_model):
    """The folder of a run of one epoch, and what goes on with it for two."""
    folder = tmp_path / "run"
    train({**toy_recipe, "epochs": 1}, make_toy_model(), toy_data, out=folder, progress=False)

    def resume():
        recipe = {**toy_recipe, "epochs": 2}
        with within(60):
            return train(recipe, make_toy_model(), toy_data, out=folder, resume=True, progress=False)

    return folder, resume


CHANGES = {
    "an epoch long before the first": lambda s: s.update(epoch=-(10**12)),
    "a batch long before the first": lambda s: s.update(batch=-(10**12)),
    "an epoch that is no number": lambda s: s.update(epoch="1"),
    "an epoch that is not whole": lambda s: s.update(epoch=0.5),
    "an epoch without end": lambda s: s.update(epoch=float("nan")),
    "another epoch than the history's": lambda s: s.update(epoch=0),
    "no history": lambda s: s.update(history=[]),
    "a history of nothing": lambda s: s.update(history=[None]),
    "no weights": lambda s: s.pop("model"),
    "weights that are none": lambda s: s.update(model={"0.weight": 1}),
    "weights of another model": lambda s: s.update(model={"weight": torch.ones(1)}),
    "no random state": lambda s: s.update(random=[]),
    "a random state that is none": lambda s: s.update(random=[torch.zeros(3)]),
    "an optimizer that is none": lambda s: s.update(optimizer={"state": {}}),
    "time that is none": lambda s: s.update(seconds=float("inf")),
    "an objective that is none": lambda s: s.update(objective={"a": 1}),
    "nothing": lambda s: s.clear(),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_checkpoint_is_refused_and_training_never_goes_on_without_end(run, change):
    folder, resume = run
    saved = torch.load(folder / files.LAST, weights_only=True)
    CHANGES[change](saved)
    torch.save(saved, folder / files.LAST)
    with pytest.raises((StorageError, InputError), match=r"checkpoint|processes"):
        resume()


@pytest.mark.parametrize("content", [{}, {"epoch": 1}, {"epoch": "1", "score": 1.0, "weights": {}},
                                     {"epoch": 1, "score": float("nan"), "weights": {}}])  # fmt: skip
def test_a_changed_best_epoch_is_refused(run, content):
    folder, resume = run
    torch.save(content, folder / files.BEST)
    with pytest.raises(StorageError, match=r"best\.pt is damaged"):
        resume()


def test_the_run_of_these_tests_can_be_resumed_if_nobody_changes_it(run):
    folder, resume = run
    shutil.copytree(folder, folder.with_name("kept"))
    assert [row["epoch"] for row in resume().history] == [1, 2]
