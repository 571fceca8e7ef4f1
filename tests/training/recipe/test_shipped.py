"""The shipped recipes: those for the embedded data at a size that a test can afford, the others as they are read."""

import functools
import io
import math
import re
import threading
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import holdfast as hf
from holdfast.data import Dataset, load_data
from holdfast.models import list_models, make_model, save_model
from holdfast.models.masked import masked
from holdfast.training import display as display_module
from holdfast.training import list_recipes, load_recipe, parse_override, train
from holdfast.training.interrupt import stop_on_signal
from holdfast.utils import progress

RECIPES = {listed.name: load_recipe(listed.name) for listed in list_recipes()}
SMALL = [name for name in RECIPES if name.startswith("mnist-mini-")]
DOCS = Path(__file__).parents[3] / "docs"
PAGE, CERTIFIED = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("training", "certified-training"))
SHAPES = {"mnist-mini": (1, 28, 28), "mnist": (1, 28, 28), "cifar10": (3, 32, 32), "svhn": (3, 32, 32)}


@pytest.fixture(scope="module")
def few():
    data = load_data("mnist-mini")
    return Dataset("mnist-mini", data.train[:120], data.test[:10], data.classes)


@pytest.fixture(scope="module")
def files(few, tmp_path_factory):
    """What fine-tuning starts from: a model, and a few images more."""
    folder = tmp_path_factory.mktemp("finetune")
    save_model(make_model("small-star", seed=0), folder / "model.safetensors")
    pruned = masked(make_model("small-star", seed=0), rate=0.9, weights="own", last_batch_norm=False)
    save_model(pruned, folder / "pruned.safetensors")
    more = load_data("mnist-mini").train[200:300]
    both = {f"{kind}_{part}": getattr(more, kind).numpy() for kind in "xy" for part in ("train", "test")}
    np.savez(folder / "more.npz", classes=np.array(few.classes), **both)
    return folder


def shortened(recipe, files):
    """Overrides for two epochs in which every part of the recipe gets to work."""
    changes = {"epochs": 2, "batch_size": 20, "optimizer.lr": 2e-3, "learning_rate.name": "constant"}
    if recipe.evaluate.attack_steps > 0:
        changes["evaluate.attack_steps"] = 1
    if recipe.attack is not None and "steps" in recipe.attack.options:
        changes["attack.steps"] = 2
    if recipe.targets is not None and "start" in recipe.targets.options:
        changes["targets.start"] = 1
    if recipe.periods:
        changes["periods"] = [1, 2]
    if recipe.average.name == "swa":
        changes["average.start_epoch"] = 1
    if recipe.budget.options.get("end") is not None:
        changes |= {"budget.start": 0, "budget.end": 1}
    if "start_epoch" in recipe.objective.options:
        changes["objective.start_epoch"] = 1
    if recipe.evaluate.certify != "none":  # once before the first epoch is enough: some proofs take seconds
        changes["evaluate.certify"] = "none"
    if recipe.init is not None:
        pruned = recipe.prune is not None and recipe.prune.name == "hydra-fine-tune"
        changes["init"] = str(files / ("pruned.safetensors" if pruned else "model.safetensors"))
    if recipe.extra is not None:
        changes["extra.data"] = str(files / "more.npz")
    return changes


@pytest.mark.parametrize("name", SMALL)
def test_recipes_for_the_embedded_data_train(name, few, files):
    result = train(name, data=few, progress=False, **shortened(RECIPES[name], files))
    history = result.history
    assert all(math.isfinite(value) for row in history for value in row.values())
    rises = any("ramp_up" in options for options in RECIPES[name].regularizers.values())
    if RECIPES[name].budget.name == "constant" and not RECIPES[name].objective.options.get("start_epoch") and not rises:
        assert history[1]["train_loss"] < history[0]["train_loss"]
    assert result.model(few.test.x).isfinite().all()


def test_every_method_has_a_recipe_for_the_embedded_data():
    used = set()
    for name in SMALL:
        recipe = RECIPES[name]
        parts = (recipe.objective, recipe.attack, recipe.targets, recipe.perturb_weights, recipe.prune)
        used |= {part.name for part in parts if part is not None} | set(recipe.regularizers) | {recipe.average.name}
        used |= {"pas"} if recipe.periods else set()
    assert {method.name for method in hf.methods("train")} <= used


@pytest.fixture(scope="module")
def zoo():
    return {model.name for model in list_models()}


def frozen(value):
    """Lists as tuples, which a cache can tell apart."""
    return tuple(frozen(part) for part in value) if isinstance(value, list) else value


@functools.cache
def output_shape(model, options, shape):
    """Of two inputs, without memory for weights; many recipes share a model."""
    with torch.device("meta"):
        return make_model(model, **{"input_shape": shape, **dict(options)})(torch.zeros(2, *shape)).shape


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_name_their_data_and_a_model_of_the_zoo(name, zoo):
    recipe = RECIPES[name]
    assert recipe.summary
    assert recipe.needs
    if name.startswith("own-"):  # model and data are the user's
        assert (recipe.data, recipe.model) == (None, None)
        assert "--model and --data of yours" in recipe.needs
        return
    assert name.startswith(f"{recipe.data}-")
    assert recipe.model.name in zoo
    assert recipe.init is None or "init" in recipe.needs or "runs/" in recipe.needs
    options = {key: frozen(value) for key, value in recipe.model.options.items()}
    assert output_shape(recipe.model.name, tuple(options.items()), SHAPES[recipe.data]) == (2, 10)


def value(recipe, key):
    """The value at a dotted key; options of a part count as its keys."""
    for word in key.split("."):
        if isinstance(recipe, dict):
            recipe = recipe[word]
        else:
            recipe = getattr(recipe, word) if hasattr(recipe, word) else recipe.options[word]
    return recipe


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("cifar10-trades-wrn34", {"threat": "linf:0.031", "objective.weight": 6.0, "attack.step_size": 0.007}),
        ("cifar10-mart", {"objective.weight": 5.0, "optimizer.lr": 0.01, "optimizer.weight_decay": 3.5e-3}),
        ("cifar10-awp", {"perturb_weights.name": "awp", "perturb_weights.delta": 1e-2, "epochs": 200}),
        ("cifar10-ema", {"average.decay": 0.995}),
        ("cifar10-s2o", {"regularizers.s2o.weight": 0.1}),
        ("cifar10-trades-s2o", {"regularizers.s2o.weight": 0.3, "objective.weight": 6.0}),
        ("cifar10-sat", {"targets.momentum": 0.9, "targets.start": 90, "objective.name": "trades"}),
        ("cifar10-iat", {"attack.gamma": 1.9 / 8, "attack.beta": 0.1, "attack.warmup": 5}),
        ("cifar10-pas", {"periods": (100, 150, 200), "budget.peak": 2.0, "optimizer.weight_decay": 1e-3}),
        ("cifar10-fgsm-rs", {"attack.step": 1.25, "epochs": 30}),
        ("cifar10-n-fgsm", {"attack.noise": 2.0, "attack.step": 1.0, "optimizer.lr": 0.2}),
        ("cifar10-grad-align", {"regularizers.grad-align.weight": 0.2, "attack.name": "fgsm"}),
        ("cifar10-free", {"objective.replays": 8, "epochs": 10}),
        ("cifar10-yopo", {"objective.rounds": 5, "objective.updates": 3, "epochs": 12}),
        ("cifar10-atas", {"attack.c": 0.01, "attack.beta": 0.5, "attack.step": 2.0, "epochs": 30}),
        ("cifar10-adaptive-wrn34", {"targets.rho": 0.9, "targets.beta": 0.1, "epochs": 38, "attack.name": "atta"}),
        ("cifar10-finetune-wrn34", {"extra.share": 0.5, "optimizer.lr": 1e-3, "objective.divergence_weight": 6.0}),
        # The decay adds w to the gradient of gamma |w|^2, which is 2 gamma w; gamma is 1e-3.
        ("cifar10-at-trh-vit-l16", {"regularizers.trh.weight": 1e-5, "optimizer.weight_decay": 2e-3}),
        ("cifar10-trades-trh-vit-l16", {"regularizers.trh.weight": 1e-4, "regularizers.trh.schedule": "multistep"}),
        ("cifar10-subnet", {"prune.rate": 0.99, "prune.gamma": 0.1, "prune.score_scale": 1e-3, "epochs": 400}),
        ("cifar10-subnet-fast", {"attack.name": "atta", "prune.weights": "binary", "validation": 0.02}),
        ("cifar10-rst", {"prune.gamma": 1.0, "prune.weights": "kaiming-normal", "optimizer.weight_decay": 5e-4}),
        ("mnist-pas", {"threat": "linf:0.4", "budget.peak": 1.5, "optimizer.lr": 1e-4, "epochs": 100}),
    ],
)
def test_published_numbers_are_kept(name, published):
    assert {key: value(RECIPES[name], key) for key in published} == published


def test_a_regulariser_is_compared_at_the_same_decay():
    assert RECIPES["cifar10-trh"].optimizer == RECIPES["cifar10-at"].optimizer
    assert RECIPES["cifar10-trades-trh"].optimizer == RECIPES["cifar10-trades"].optimizer


def test_recipes_of_the_documentation_load():
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        lines = block.splitlines()
        assert len(lines) == 10
        recipe = load_recipe(tomllib.loads(block))
        assert recipe.objective.name == "trades"
    for name, key, text in re.findall(r"^holdfast train (\S+) --set ([\w.]+)=(\S+)", PAGE, re.MULTILINE):
        assert load_recipe(name, dict([parse_override(f"{key}={text}")])) != RECIPES[name]


def test_the_documentation_has_every_part_with_its_options():
    for method in hf.methods("train"):
        rows = [line for line in (PAGE + CERTIFIED).splitlines() if line.startswith(f"| `{method.name}` |")]
        assert any(all(f"`{option}`" in row for option in method.options) for row in rows), method.name


def test_bars_show_epochs_batches_and_scores(monkeypatch, toy_recipe, make_toy_model, toy_data):
    screen = io.StringIO()
    for module in (display_module, progress):
        monkeypatch.setattr(module, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=120))
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
