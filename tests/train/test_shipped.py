"""The recipes for the embedded data, and the bars, at a size that a test can afford."""

import io
import threading

import pytest
from rich.console import Console

from holdfast.data import Dataset, load_data
from holdfast.train import display as display_module
from holdfast.train import list_recipes, train
from holdfast.train.interrupt import stop_on_signal


@pytest.fixture(scope="module")
def few():
    data = load_data("mnist-mini")
    return Dataset("mnist-mini", data.train[:600], data.test[:10], data.classes)


@pytest.mark.parametrize("name", ["mnist-mini-standard", "mnist-mini-at"])
def test_recipes_for_the_embedded_data_run(name, few):
    history = train(name, data=few, epochs=2, progress=False).history
    assert history[1]["train_loss"] < history[0]["train_loss"]


def test_models_of_all_recipes_are_in_the_zoo():
    from holdfast.models import list_models

    known = {model.name for model in list_models()}
    assert {recipe.model.name for recipe in list_recipes()} <= known


def test_bars_show_epochs_batches_and_scores(monkeypatch, toy_recipe, make_toy_model, toy_data):
    screen = io.StringIO()
    monkeypatch.setattr(display_module, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=120))
    train(toy_recipe, make_toy_model(), toy_data)
    shown = screen.getvalue()
    assert "epoch" in shown
    assert "loss" in shown
    assert "robust" in shown
    screen.seek(0)
    screen.truncate()
    train(toy_recipe, make_toy_model(), toy_data, progress=False)
    assert screen.getvalue() == ""


def test_training_in_a_thread_leaves_the_signals_alone(toy_recipe, make_toy_model, toy_data):
    results = []
    worker = threading.Thread(target=lambda: results.append(train(toy_recipe, make_toy_model(), toy_data, epochs=1)))
    worker.start()
    worker.join()
    assert len(results[0].history) == 1
    with stop_on_signal() as flag:
        assert not flag.is_set
