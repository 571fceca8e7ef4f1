"""What lives longer than a step: periods and their ensemble, additional data, a first model, patience, checkpoints."""

import math
import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import InputError
from holdfast.models import Ensemble, load_model, save_model
from holdfast.models import make_model as make_zoo_model
from holdfast.training import Interrupted, load_recipe, loop, train
from holdfast.training.schedules import BUDGETS

TIMES = ("seconds", "images_per_second", "peak_memory_mb")
MLP = {"name": "mlp", "hidden": [6]}


def assert_same_run(a, b):
    weights_a, weights_b = a.model.state_dict(), b.model.state_dict()
    assert weights_a.keys() == weights_b.keys()
    assert all(torch.equal(weights_a[key], weights_b[key]) for key in weights_a)
    for row, other in zip(a.history, b.history, strict=True):
        assert {k: v for k, v in row.items() if k not in TIMES} == {k: v for k, v in other.items() if k not in TIMES}


@pytest.fixture
def steps(monkeypatch):
    """Every batch of the runs in a test: (x, y, context, learning rate); `steps.kill` interrupts before that one."""

    class Steps(list):
        kill: int | None = None

    seen = Steps()
    make_batch = loop.make_batch

    def watch(task, run, index, batches):
        x, y, context = make_batch(task, run, index, batches)
        if len(seen) == seen.kill:
            seen.kill = None
            os.kill(os.getpid(), signal.SIGINT)
        seen.append((x, y, context, run.optimizer.param_groups[0]["lr"]))
        return x, y, context

    monkeypatch.setattr(loop, "make_batch", watch)
    return seen


# -- Periods --

PERIODS = {
    "epochs": 5,
    "periods": [2, 3, 5],
    "model": MLP,
    "learning_rate": {"name": "multistep", "milestones": [1], "gamma": 0.1},
    "budget": {"name": "linear", "peak": 2.0},
}


def test_schedules_start_anew_with_every_period(toy_recipe, toy_data, steps):
    history = train({**toy_recipe, **PERIODS}, data=toy_data).history
    expected = []
    for length in (2, 1, 2):
        for epoch in range(length):
            for batch in range(4):
                position = epoch + (batch + 0.5) / 4
                expected.append((0.1 if position < 1 else 0.01, 0.05 * min(1.0, 2 * position / length)))
    assert [lr for *_, lr in steps] == pytest.approx([lr for lr, _ in expected])
    assert [context.threat.budget for _, _, context, _ in steps] == pytest.approx([budget for _, budget in expected])
    assert [row["learning_rate"] for row in history] == pytest.approx([lr for lr, _ in expected[3::4]])
    assert [row["budget"] for row in history] == pytest.approx([budget for _, budget in expected[3::4]])
    assert [row["learning_rate"] for row in history] == pytest.approx([0.1, 0.01, 0.1, 0.1, 0.01])


def test_published_periods_start_at_100_and_150():
    settings = {"epochs": 200, "periods": [100, 150, 200], "threat": "linf:8/255"}
    parts = {"objective": {"name": "at"}, "optimizer": {"lr": 0.1}, "budget": {"name": "cosine", "peak": 2.0}}
    recipe = load_recipe({**settings, **parts})
    assert [recipe.period(t) for t in (0, 99.5, 100, 149.5, 150, 199.5, 200)] == [
        *[(0, 100), (99.5, 100), (0, 50), (49.5, 50)],
        *[(0, 50), (49.5, 50), (50, 50)],
    ]
    budgets = [loop.budget_factor(recipe, t) for t in (0, 25, 50, 99.9, 100, 112.5, 125, 150, 175)]
    assert budgets == pytest.approx([0, 1 - math.sqrt(0.5), 1, 1, 0, 1 - math.sqrt(0.5), 1, 0, 1])


def test_the_ensemble_of_the_last_models_of_the_periods_answers(toy_recipe, toy_data, tmp_path):
    recipe = {**toy_recipe, **PERIODS}
    result = train(recipe, data=toy_data, out=tmp_path / "run")
    assert isinstance(result.model, Ensemble)
    assert not result.model.training
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert len(saved["snapshots"]) == len(result.model.members) == 3
    for member, weights in zip(result.model.members, saved["snapshots"], strict=True):
        assert all(torch.equal(value, weights[key]) for key, value in member.state_dict().items())
    assert all(torch.equal(value, saved["model"][key]) for key, value in saved["snapshots"][-1].items())
    # The first period does not know of the others: alone, it gives the first member.
    alone = train({**recipe, "epochs": 2, "periods": [2]}, data=toy_data).model
    first = result.model.members[0].state_dict()
    assert all(torch.equal(value, first[key]) for key, value in alone.members[0].state_dict().items())
    x = toy_data.test.x
    mean = torch.stack([member(x).softmax(1) for member in result.model.members]).mean(0)
    assert torch.allclose(result.model(x).softmax(1), mean, atol=1e-6)
    loaded = load_model(tmp_path / "run" / "model.safetensors")
    assert isinstance(loaded, Ensemble)
    assert torch.equal(loaded(x), result.model(x))


@pytest.mark.parametrize("kill", [1, 9, 15])
def test_a_run_in_periods_is_resumed_in_the_middle_of_one(toy_recipe, toy_data, tmp_path, steps, kill):
    recipe = {**toy_recipe, **PERIODS}
    whole = train(recipe, data=toy_data)
    steps.clear()
    steps.kill = kill
    with pytest.raises(Interrupted):
        train(recipe, data=toy_data, out=tmp_path / "run")
    assert_same_run(whole, train(recipe, data=toy_data, out=tmp_path / "run", resume=True))


@pytest.mark.parametrize(
    ("name", "peak", "full"), [("cosine", 1.5, 0.608), ("linear", 2.0, 0.5), ("cosine", 2.0, 0.5), ("linear", 1.0, 1.0)]
)
def test_rising_budgets_reach_the_target_where_they_should(name, peak, full):
    """The full budget is met at the fraction acos(1 - 2 / peak) / pi of the period, or 1 / peak."""
    exact = math.acos(1 - 2 / peak) / math.pi if name == "cosine" else 1 / peak
    assert exact == pytest.approx(full, abs=5e-4)
    rise = BUDGETS[name]
    assert rise(0, 40, peak=peak) == 0
    assert rise(40 * exact * 0.999, 40, peak=peak) < 1
    assert rise(40 * exact + 1e-9, 40, peak=peak) == pytest.approx(1)
    assert rise(40, 40, peak=peak) == 1


@given(st.sampled_from(["linear", "cosine"]), st.floats(1, 4), st.floats(0, 30), st.floats(0, 30))
def test_rising_budgets_never_fall_and_never_pass_the_target(name, peak, a, b):
    low, high = (BUDGETS[name](t, 30, peak=peak) for t in sorted((a, b)))
    assert 0 <= low <= high <= 1


# -- Additional data --


@pytest.fixture
def extra(tmp_path, toy_data):
    """30 more images, brighter than any of the others."""

    def write(name="extra.npz", **change):
        x = 0.95 + 0.05 * np.random.default_rng(0).random((30, 1, 5, 4)).astype(np.float32)
        arrays = {"x_train": x, "y_train": np.arange(30) % 2, "x_test": x[:2], "y_test": np.arange(2), "layout": "NCHW"}
        np.savez(tmp_path / name, **{**arrays, **change})
        return str(tmp_path / name)

    return write


def test_batches_hold_their_share_of_both(toy_recipe, make_toy_model, toy_data, extra, steps):
    """16 with a share of a quarter: 4 of 30 additional images each, so 8 batches; 12 of 56 others, in a stream."""
    recipe = {**toy_recipe, "extra": {"data": extra(), "share": 0.25}, "epochs": 3}
    train(recipe, make_toy_model(), toy_data)
    assert len(steps) == 24
    new = [context.index[context.index >= 56].tolist() for _, _, context, _ in steps]
    own = [context.index[context.index < 56].tolist() for _, _, context, _ in steps]
    assert [len(part) for part in new] == ([4] * 7 + [2]) * 3
    assert [len(part) for part in own] == [12] * 24
    for epoch in range(3):
        assert sorted(i for part in new[8 * epoch : 8 * epoch + 8] for i in part) == list(range(56, 86))
    assert new[:8] != new[8:16]
    stream = [i for part in own for i in part]
    turns = [stream[start : start + 56] for start in range(0, 56 * 5, 56)]
    assert all(sorted(turn) == list(range(56)) for turn in turns)
    assert turns[0] != turns[1]
    for x, _, context, _ in steps[:8]:
        bright = x.flatten(1).min(1).values >= 0.95
        assert torch.equal(bright, context.index >= 56)
        assert context.count == 86


@pytest.mark.parametrize(("share", "new"), [(0.5, 8), (0.0, 1), (1.0, 15)])
def test_every_batch_holds_both_kinds(toy_recipe, make_toy_model, toy_data, extra, steps, share, new):
    train({**toy_recipe, "extra": {"data": extra(), "share": share}, "epochs": 1}, make_toy_model(), toy_data)
    counts = [int((context.index >= 56).sum()) for _, _, context, _ in steps]
    assert counts[:-1] == [new] * (len(counts) - 1)
    assert sum(counts) == 30
    assert [len(context.index) - count for (_, _, context, _), count in zip(steps, counts, strict=True)] == [
        16 - new
    ] * len(counts)


def test_additional_data_must_be_alike(toy_recipe, make_toy_model, toy_data, extra):
    large = extra("large.npz", x_train=np.zeros((30, 1, 6, 6), np.float32), x_test=np.zeros((2, 1, 6, 6), np.float32))
    with pytest.raises(InputError, match=r"extra\.data: .* has inputs of shape \(1, 6, 6\) .* must be alike"):
        train({**toy_recipe, "extra": {"data": large}}, make_toy_model(), toy_data)
    many = extra("many.npz", y_train=np.arange(30) % 5)
    with pytest.raises(InputError, match=r"extra\.data: .* 5 classes, 'toy' .* and 2"):
        train({**toy_recipe, "extra": {"data": many}}, make_toy_model(), toy_data)


# -- A first model --


def test_a_run_starts_from_the_weights_of_a_file(toy_recipe, toy_data, tmp_path):
    first = make_zoo_model("mlp", input_shape=(1, 5, 4), classes=2, hidden=(7,), seed=5)
    save_model(first, tmp_path / "first.safetensors")
    still = {**toy_recipe, "epochs": 1, "optimizer": {"lr": 1e-30}, "init": str(tmp_path / "first.safetensors")}
    result = train({**still, "model": MLP}, data=toy_data, out=tmp_path / "run")
    assert all(torch.equal(value, first.state_dict()[key]) for key, value in result.model.state_dict().items())
    assert load_recipe(tmp_path / "run").model.options["hidden"] == [7]  # the file takes the place of [model]
    other = make_zoo_model("mlp", input_shape=(1, 5, 4), classes=2, hidden=(7,), seed=6)
    given = train(still, other, toy_data)
    assert given.model is other
    assert all(torch.equal(value, first.state_dict()[key]) for key, value in other.state_dict().items())
    with pytest.raises(InputError, match="holds 'mlp' with"):
        train(still, make_zoo_model("mlp", input_shape=(1, 5, 4), classes=2, hidden=(9,)), toy_data)


# -- Patience --


@pytest.mark.parametrize(
    ("scores", "epochs"),
    [
        ([0.5, 0.6, 0.4, 0.5, 0.9, 0.9], 4),  # two epochs in a row below the second
        ([0.5, 0.4, 0.6, 0.4, 0.6, 0.7], 6),  # one bad epoch at a time; an equal one counts as the best
        ([0.9, 0.8, 0.8, 0.8, 0.8, 0.8], 3),
    ],
)
def test_patience_stops_the_run(toy_recipe, make_toy_model, toy_data, tmp_path, monkeypatch, scores, epochs):
    given_scores = list(scores)
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: {"clean": 0.9, "robust": given_scores.pop(0)})
    recipe = {**toy_recipe, "epochs": 6, "evaluate": {"attack_steps": 2, "patience": 2}}
    result = train(recipe, make_toy_model(), toy_data, out=tmp_path / "run")
    assert len(result.history) == epochs
    again = train(recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=True)
    assert_same_run(result, again)


# -- Checkpoints --

STATEFUL = {
    "atta": {"attack": {"name": "atta", "reset_every": 3}, "augment": {"crop": 1, "flip": True}},
    "atas": {"attack": {"name": "atas", "warmup": 1}, "augment": {"crop": 1}},
    "iat": {"attack": {"name": "iat", "steps": 2, "warmup": 1, "gamma": 0.5}},
    "adaptive": {
        "attack": {"name": "atta"},
        "targets": {"name": "adaptive", "start": 1, "beta": 0.2, "rho": 0.5, "reweight": True},
    },
    "self-adaptive": {"objective": {"name": "trades"}, "targets": {"name": "self-adaptive", "start": 1}},
    "geometry": {"targets": {"name": "geometry", "start": 1}},
    "free": {"objective": {"name": "free", "replays": 3}, "attack": None},
    "yopo": {"objective": {"name": "yopo", "rounds": 2}, "attack": None},
    "ema, awp and trh": {
        "average": {"name": "ema", "decay": 0.9},
        "perturb_weights": {"name": "awp", "delta": 0.01, "start": 1},
        "regularizers": {"trh": {"weight": 0.01, "schedule": "linear"}, "s2o": {}},
    },
    "swa and sam": {"average": {"name": "swa", "start_epoch": 1}, "perturb_weights": {"name": "sam"}},
    "additional data": {"attack": {"name": "atta"}, "extra": {"share": 0.25}},
}


@pytest.mark.parametrize("name", STATEFUL)
def test_an_interrupted_run_ends_as_the_whole_one(toy_recipe, make_toy_model, toy_data, tmp_path, extra, steps, name):
    """Twice: in the first epoch, where the state is young, and in the middle of a later one."""
    recipe = {**toy_recipe, **STATEFUL[name]}
    if "extra" in recipe:
        recipe["extra"] = {**recipe["extra"], "data": extra()}
    whole = train(recipe, make_toy_model(), toy_data)
    count = len(steps)
    for fraction in (0.1, 0.55):
        steps.kill = count + int(fraction * count)
        with pytest.raises(Interrupted):
            train(recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=fraction > 0.1)
    resumed = train(recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=True)
    assert_same_run(whole, resumed)


@pytest.mark.parametrize(
    ("name", "key"), [("atta", "delta"), ("iat", "eps"), ("adaptive", "target"), ("free", "delta")]
)
def test_without_its_state_a_resumed_run_is_another(toy_recipe, make_toy_model, toy_data, tmp_path, name, key):
    """The test above can fail: what is kept does matter."""
    recipe = {**toy_recipe, **STATEFUL[name], "threat": "linf:0.2", "validation": 0}
    whole = train(recipe, make_toy_model(), toy_data)
    train(recipe, make_toy_model(), toy_data, out=tmp_path / "run", epochs=2)
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    saved = torch.load(path, weights_only=True)
    saved["objective"][key] = 0.3 * saved["objective"][key]
    torch.save(saved, path)
    resumed = train(recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=True)
    assert resumed.history[-1]["train_loss"] != whole.history[-1]["train_loss"]


def test_iat_and_adaptive_write_what_they_do_into_the_history(toy_recipe, make_toy_model, toy_data, tmp_path):
    result = train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", attack=STATEFUL["iat"]["attack"])
    assert "train_eps" not in result.history[0]
    assert all(0 < row["train_eps"] <= 0.05 * 3 for row in result.history[1:])
    assert (tmp_path / "run" / "history.csv").read_text().splitlines()[0].count("train_eps") == 1
    atas = train(toy_recipe, make_toy_model(), toy_data, attack={"name": "atas", "largest": 1.5})
    assert all(0 < row["train_step"] <= 1.5 for row in atas.history)


def test_the_model_of_a_run_is_a_module_of_its_own(toy_recipe, toy_data):
    """Members do not share weights with each other or with the model that was trained."""
    model = make_zoo_model("mlp", input_shape=(1, 5, 4), classes=2, hidden=(6,), seed=1)
    result = train({**toy_recipe, **PERIODS}, model, toy_data)
    assert isinstance(result.model, Ensemble)
    pointers = [p.data_ptr() for module in (model, *result.model.members) for p in module.parameters()]
    assert len(set(pointers)) == len(pointers)
