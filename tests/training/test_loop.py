import csv
import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from holdfast import HoldfastError, InputError, StorageError
from holdfast.data import Dataset, Split
from holdfast.models import load_model, make_model
from holdfast.training import Interrupted, load_recipe, train
from holdfast.training import folder as run_files

TIMES = ("seconds", "images_per_second", "peak_memory_mb")


def without_times(history):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in history]


def assert_same_run(a, b):
    weights_a, weights_b = a.model.state_dict(), b.model.state_dict()
    assert weights_a.keys() == weights_b.keys()
    assert all(torch.equal(weights_a[key], weights_b[key]) for key in weights_a)
    assert without_times(a.history) == without_times(b.history)


def test_learns_and_reports(toy_recipe, make_toy_model, toy_data):
    result = train(toy_recipe, make_toy_model(), toy_data, epochs=8)
    assert result.path is None
    assert not result.model.training
    assert [row["epoch"] for row in result.history] == list(range(1, 9))
    first, last = result.history[0], result.history[-1]
    assert last["train_loss"] < first["train_loss"]
    assert last["validation_robust"] <= last["validation_clean"]
    with torch.no_grad():
        right = result.model(toy_data.test.x).argmax(1) == toy_data.test.y
    assert right.float().mean() > 0.9


def test_seed_decides_and_the_global_generator_is_left_alone(toy_recipe, make_toy_model, toy_data):
    model = make_toy_model()
    before = torch.get_rng_state()
    first = train(toy_recipe, model, toy_data)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(5)
    assert_same_run(first, train(toy_recipe, make_toy_model(), toy_data))
    other = train(toy_recipe, make_toy_model(), toy_data, seed=1)
    assert other.history[0]["train_loss"] != first.history[0]["train_loss"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"average": {"name": "ema", "decay": 0.9}, "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}},
        {"average": {"name": "swa", "start_epoch": 1}, "augment": {"crop": 1, "flip": True}, "validation": 0},
        {"budget": {"name": "linear", "end": 2}, "learning_rate": {"name": "step", "every": 1}, "warmup": 0.5},
    ],
)
def test_two_epochs_and_two_more_are_four(toy_recipe, make_toy_model, toy_data, tmp_path, change):
    whole = train(toy_recipe, make_toy_model(), toy_data, **change)
    train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", epochs=2, **change)
    resumed = train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=True, **change)
    assert_same_run(whole, resumed)
    again = train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=True, **change)
    assert_same_run(whole, again)


@pytest.mark.parametrize("at_step", [0, 5, 7, 13])
def test_interrupt_in_the_middle_of_an_epoch(toy_recipe, make_toy_model, toy_data, tmp_path, add_objective, at_step):
    """Real signals, delivered inside a step; four batches per epoch, the last one smaller."""
    kill = []

    def objective(model, x, y, context):
        if context.step in kill:
            os.kill(os.getpid(), signal.SIGINT)
            kill.clear()
        logits = model(x)
        return cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).float().mean()}

    add_objective("test-killed", objective)
    toy_recipe |= {"objective": {"name": "test-killed"}, "attack": None}
    handler = signal.getsignal(signal.SIGINT)
    whole = train(toy_recipe, make_toy_model(), toy_data)
    kill.append(at_step)
    with pytest.raises(Interrupted, match=rf"in epoch {at_step // 4 + 1} after .* of 4 batches.*--resume"):
        train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (tmp_path / "run" / "model.safetensors").exists()
    resumed = train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=True)
    assert_same_run(whole, resumed)


def test_interrupt_without_a_folder_says_so(toy_recipe, make_toy_model, toy_data, add_objective):
    def objective(model, x, y, context):
        os.kill(os.getpid(), signal.SIGTERM)
        return cross_entropy(model(x), y), {}

    add_objective("test-stop", objective)
    toy_recipe |= {"objective": {"name": "test-stop"}, "attack": None}
    with pytest.raises(Interrupted, match="nothing is kept"):
        train(toy_recipe, make_toy_model(), toy_data)


def test_second_signal_stops_at_once(toy_recipe, make_toy_model, toy_data, add_objective):
    def objective(model, x, y, context):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("still running")

    add_objective("test-twice", objective)
    toy_recipe |= {"objective": {"name": "test-twice"}, "attack": None}
    with pytest.raises(KeyboardInterrupt):
        train(toy_recipe, make_toy_model(), toy_data)


def test_run_folder_repeats_the_run(toy_recipe, toy_data, tmp_path):
    toy_recipe["model"] = {"name": "mlp", "hidden": [8]}
    first = train(toy_recipe, data=toy_data, out=tmp_path / "a", optimizer={"lr": 0.2})
    assert first.path == tmp_path / "a"
    second = train(tmp_path / "a", data=toy_data, out=tmp_path / "b")
    assert_same_run(first, second)
    assert (tmp_path / "a" / "recipe.toml").read_text().replace('"a"', '"b"') == (
        tmp_path / "b" / "recipe.toml"
    ).read_text()
    with (tmp_path / "a" / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["train_loss"]) for row in rows] == [row["train_loss"] for row in first.history]
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    assert (about["seed"], about["torch"], about["training examples"]) == (0, torch.__version__, 56)
    loaded = load_model(tmp_path / "a" / "model.safetensors")
    assert torch.equal(loaded(toy_data.test.x), first.model(toy_data.test.x))


def test_resume_by_the_folder_alone(toy_recipe, toy_data, tmp_path):
    toy_recipe["model"] = {"name": "mlp", "hidden": [8]}
    whole = train(toy_recipe, data=toy_data)
    train(toy_recipe, data=toy_data, out=tmp_path / "run", epochs=1)
    assert_same_run(whole, train(str(tmp_path / "run"), data=toy_data, resume=True, epochs=4))


def test_given_model_of_ours_is_written_into_the_recipe(toy_recipe, toy_data, tmp_path):
    model = make_model("mlp", input_shape=(1, 5, 4), classes=2, hidden=(6,), seed=1)
    train(toy_recipe, model, toy_data, out=tmp_path / "run", epochs=1)
    written = load_recipe(tmp_path / "run")
    assert written.model.name == "mlp"
    assert written.model.options["hidden"] == [6]


def test_best_epoch_is_the_one_returned(toy_recipe, make_toy_model, toy_data, tmp_path):
    """A learning rate that grows destroys the model after a good start: the best epoch must survive."""
    toy_recipe |= {"learning_rate": {"name": "step", "every": 3.0, "gamma": 1000.0}, "epochs": 6}
    result = train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run")
    scores = [row["validation_robust"] for row in result.history]
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.pt", weights_only=True)
    assert best["score"] == max(scores) > scores[-1]
    assert best["epoch"] == max(i for i, score in enumerate(scores, 1) if score == max(scores))
    assert all(torch.equal(value, best["weights"][key]) for key, value in result.model.state_dict().items())


def test_test_split_has_no_influence(toy_recipe, make_toy_model, toy_data):
    scrambled = Dataset("toy", toy_data.train, Split(toy_data.test.x, 1 - toy_data.test.y), toy_data.classes)
    assert_same_run(train(toy_recipe, make_toy_model(), toy_data), train(toy_recipe, make_toy_model(), scrambled))


def reference_sgd(model, data, recipe, epochs):
    """An independent loop: plain gradient descent on the whole batch, one step per epoch."""
    for _ in range(epochs):
        gradients = torch.autograd.grad(cross_entropy(model(data.x), data.y), list(model.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        scale = min(1.0, recipe["optimizer"]["clip_norm"] / float(norm))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= recipe["optimizer"]["lr"] * scale * gradient


def make_plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 2))


PLAIN = {
    "epochs": 3,
    "batch_size": 70,
    "validation": 0,
    "objective": {"name": "standard"},
    "optimizer": {"lr": 0.5, "momentum": 0.0, "clip_norm": 0.1},
}


def test_matches_an_independent_loop(toy_data):
    result = train(PLAIN, make_plain_model(), toy_data)
    expected = make_plain_model()
    reference_sgd(expected, toy_data.train, PLAIN, 3)
    assert torch.allclose(result.model[1].weight, expected[1].weight, atol=1e-6)
    assert result.history[0]["gradient_norm"] > 0.1


def test_averages_match_their_formulas(toy_data):
    trajectory = []
    for epochs in range(1, 4):
        model = make_plain_model()
        reference_sgd(model, toy_data.train, PLAIN, epochs)
        trajectory.append(model[1].weight.detach())
    swa = train(PLAIN, make_plain_model(), toy_data, average={"name": "swa", "start_epoch": 1}).model[1].weight
    assert torch.allclose(swa, (trajectory[1] + trajectory[2]) / 2, atol=1e-6)
    ema = train(PLAIN, make_plain_model(), toy_data, average={"name": "ema", "decay": 0.8}).model[1].weight
    expected = 0.8 * (0.8 * trajectory[0] + 0.2 * trajectory[1]) + 0.2 * trajectory[2]
    assert torch.allclose(ema, expected, atol=1e-6)


def test_average_is_chosen_only_once_there_is_one(toy_recipe, make_toy_model, toy_data, tmp_path):
    train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", average={"name": "swa", "start_epoch": 3})
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.pt", weights_only=True)
    assert best["epoch"] == 4


def test_schedules_reach_the_optimizer_and_the_threat(toy_data, add_objective):
    seen = []

    def objective(model, x, y, context):
        seen.append((context.epoch, context.step, context.threat.budget, context.optimizer.param_groups[0]["lr"]))
        return cross_entropy(model(x), y), {}

    add_objective("test-seen", objective, threats=("linf",))
    recipe = {
        **PLAIN,
        "epochs": 2,
        "batch_size": 35,
        "threat": "linf:0.4",
        "objective": {"name": "test-seen"},
        "budget": {"name": "linear", "end": 1},
        "learning_rate": {"name": "multistep", "milestones": [1], "gamma": 0.1},
    }
    history = train(recipe, make_plain_model(), toy_data).history
    expected = [(0, 0, 0.1, 0.5), (0, 1, 0.3, 0.5), (1, 2, 0.4, 0.05), (1, 3, 0.4, 0.05)]
    assert torch.allclose(torch.tensor(seen), torch.tensor(expected))
    assert [row["budget"] for row in history] == pytest.approx([0.3, 0.4])
    assert [row["learning_rate"] for row in history] == pytest.approx([0.5, 0.05])


def test_room_for_caches_and_weight_perturbations(toy_recipe, make_toy_model, toy_data, tmp_path, add_objective):
    """A per-example cache, moved with the augmentation, and a loss at perturbed weights; both survive a resume."""

    def objective(model, x, y, context, *, size: float = 0.05):
        cache = context.state.setdefault("delta", torch.zeros(context.count, *x.shape[1:]))
        visits = context.state.setdefault("visits", torch.zeros(context.count, dtype=torch.int64))
        delta = context.transform(cache[context.index]).requires_grad_(True)
        parameters = dict(model.named_parameters())
        loss = cross_entropy(model(x + delta), y)
        step, *ascent = torch.autograd.grad(loss, [delta, *parameters.values()])
        cache[context.index] = (delta + size * step.sign()).clamp(-0.1, 0.1).detach()
        visits[context.index] += 1
        perturbed = {k: p + 0.01 * a for (k, p), a in zip(parameters.items(), ascent, strict=True)}
        return cross_entropy(functional_call(model, perturbed, (x + delta.detach(),)), y), {"visits": visits.max()}

    add_objective("test-cached", objective)
    toy_recipe |= {"objective": {"name": "test-cached"}, "attack": None, "augment": {"crop": 1}}
    whole = train(toy_recipe, make_toy_model(), toy_data)
    assert [row["train_visits"] for row in whole.history] == [1, 2, 3, 4]
    train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", epochs=2)
    assert_same_run(whole, train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=True))
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)["objective"]
    assert state["visits"].tolist() == [4] * 56


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_divergence_stops_and_keeps_the_last_good_checkpoint(
    toy_recipe, make_toy_model, toy_data, tmp_path, add_objective, what
):
    def objective(model, x, y, context):
        loss = cross_entropy(model(x), y)
        if context.step == 5:
            # The square root has an infinite slope at zero: a finite loss with a gradient that is not.
            loss = loss * float("nan") if what == "loss" else loss + (loss - loss.detach()).sqrt()
        return loss, {}

    add_objective("test-nan", objective)
    toy_recipe |= {"objective": {"name": "test-nan"}, "attack": None}
    with pytest.raises(HoldfastError, match=rf"the {what} became (nan|inf) in epoch 2, batch 2"):
        train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run")
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert (saved["epoch"], saved["batch"]) == (1, 0)
    assert all(bool(torch.isfinite(value).all()) for value in saved["model"].values())


def test_float64_models_train_in_float64(toy_recipe, make_toy_model, toy_data):
    result = train(toy_recipe, make_toy_model().double(), toy_data, epochs=1)
    assert result.model[1].weight.dtype == torch.float64


def test_existing_run_is_not_overwritten(toy_recipe, make_toy_model, toy_data, tmp_path):
    folder = tmp_path / "run"
    train(toy_recipe, make_toy_model(), toy_data, out=folder, epochs=1)
    (folder / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"already holds a run .*resume=True.*force=True"):
        train(toy_recipe, make_toy_model(), toy_data, out=folder)
    with pytest.raises(InputError, match="returns 3 logits"):  # a bad call must not clear the folder
        train(toy_recipe, make_toy_model(3), toy_data, out=folder, force=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    result = train(toy_recipe, make_toy_model(), toy_data, out=folder, epochs=2, force=True)
    assert len(result.history) == 2
    assert (folder / "notes.txt").read_text() == "mine"


def test_bad_resumes(toy_recipe, make_toy_model, toy_data, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(InputError, match="no run to resume"):
        train(toy_recipe, make_toy_model(), toy_data, out=folder, resume=True)
    with pytest.raises(InputError, match="resume needs the folder"):
        train(toy_recipe, make_toy_model(), toy_data, resume=True)
    with pytest.raises(InputError, match="exclude each other"):
        train(toy_recipe, make_toy_model(), toy_data, out=folder, resume=True, force=True)
    train(toy_recipe, make_toy_model(), toy_data, out=folder, epochs=1)
    with pytest.raises(InputError, match=r"batch_size: the run has 16, the recipe now says 8"):
        train(toy_recipe, make_toy_model(), toy_data, out=folder, resume=True, batch_size=8)
    with pytest.raises(InputError, match=r"weights of another model"):
        train(toy_recipe, nn.Sequential(nn.Flatten(), nn.Linear(20, 2)), toy_data, out=folder, resume=True)
    other = Dataset("toy", Split(toy_data.train.x.flip(0), toy_data.train.y), toy_data.test, toy_data.classes)
    with pytest.raises(InputError, match="trained on other data"):
        train(toy_recipe, make_toy_model(), other, out=folder, resume=True)


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_damaged_checkpoint(toy_recipe, make_toy_model, toy_data, tmp_path, damage):
    train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", epochs=1)
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    last.write_bytes(last.read_bytes()[:-2000] if damage is None else damage)
    with pytest.raises(StorageError, match=r"checkpoint .*last\.pt is damaged .*force=True"):
        train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=True)
    last.unlink()
    with pytest.raises(StorageError, match=r"there is no checkpoint .*last\.pt"):
        train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", resume=True)


def test_checkpoints_never_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    torch.save({"model": Evil()}, tmp_path / "last.pt")
    with pytest.raises(StorageError, match="damaged"):
        run_files.read_tensors(tmp_path / "last.pt")
    assert not (tmp_path / "owned").exists()
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(StorageError, match="not one of Holdfast's"):
        run_files.read_tensors(tmp_path / "list.pt")


def test_full_disk_damages_nothing(toy_recipe, make_toy_model, toy_data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    train(toy_recipe, make_toy_model(), toy_data, out=folder, epochs=1)
    before = (folder / "checkpoints" / "last.pt").read_bytes()

    def no_room(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_room)
        with pytest.raises(StorageError, match=r"cannot write .*No space left on device.*untouched"):
            train(toy_recipe, make_toy_model(), toy_data, out=folder, resume=True)
    assert (folder / "checkpoints" / "last.pt").read_bytes() == before
    assert not list(folder.rglob("*.part"))
    assert len(train(toy_recipe, make_toy_model(), toy_data, out=folder, resume=True).history) == 4


def test_folder_that_cannot_be(toy_recipe, make_toy_model, toy_data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"out: .*file is a file"):
        train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "file")
    with pytest.raises(StorageError, match="cannot write"):
        train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "file" / "run")


def test_model_and_data_must_fit(toy_recipe, make_toy_model, toy_data):
    with pytest.raises(InputError, match=r"the model returns 3 logits but the data 'toy' has 2 classes"):
        train(toy_recipe, make_toy_model(3), toy_data)
    bad = Dataset("toy", toy_data.train, toy_data.test, ("only",))
    with pytest.raises(InputError, match="outside the classes 0 to 0"):
        train(toy_recipe, make_toy_model(1), bad)
    one = Dataset("toy", Split(toy_data.train.x, 0 * toy_data.train.y), toy_data.test, ("only",))
    with pytest.raises(InputError, match=r"'toy' has 1 class; .* at least 2"):
        train(toy_recipe, make_toy_model(1), one)
    with pytest.raises(InputError, match="failed on a batch of shape"):
        train(toy_recipe, nn.Linear(3, 2), toy_data)
    with pytest.raises(InputError, match="no parameters"):
        train(toy_recipe, nn.Flatten(), toy_data)
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, got str"):
        train(toy_recipe, "mlp", toy_data)
    frozen = make_toy_model().requires_grad_(False)
    with pytest.raises(InputError, match="nothing to train"):
        train(toy_recipe, frozen, toy_data)
    with pytest.raises(InputError, match="data: missing"):
        train(toy_recipe, make_toy_model())
    with pytest.raises(InputError, match="model: missing"):
        train(toy_recipe, data=toy_data)


def test_tensorboard(toy_recipe, make_toy_model, toy_data, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="tensorboard: needs a folder"):
        train(toy_recipe, make_toy_model(), toy_data, tensorboard=True)
    train(toy_recipe, make_toy_model(), toy_data, tensorboard=True, epochs=2, out=tmp_path / "run")
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'holdfast\[tensorboard\]'"):
        train(toy_recipe, make_toy_model(), toy_data, tensorboard=True, out=tmp_path / "other")
