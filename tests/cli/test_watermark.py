"""`holdfast watermark` as a user meets it."""

import csv
import json

import pytest
import torch
from typer.testing import CliRunner

import holdfast as hf
from holdfast.apps.watermark import content_triggers, load_triggers, noisy_accuracies, save_triggers
from holdfast.cli.watermark import app, halves
from holdfast.errors import InputError, StorageError


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a command in an empty folder; returns what it prints, or raises what it raises."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args):
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return call


@pytest.fixture
def files(tmp_path):
    """A small model, not trained at all, and a trigger set of 30."""
    data = hf.load_data("mnist-mini")
    model = hf.make_model("cnn", layers=[[2, 4, 4, 0]], hidden=[], seed=0)
    hf.save_model(model, tmp_path / "m.safetensors")
    save_triggers(content_triggers(data.train, 10, count=30), tmp_path / "t.npz")
    return "m.safetensors", "t.npz"


@pytest.fixture
def small(monkeypatch):
    """The excerpt of MNIST, cut down."""
    data = hf.load_data("mnist-mini")
    cut = hf.Dataset("cut", data.train[:200], data.test[:100], data.classes)
    monkeypatch.setattr("holdfast.cli.watermark.load_data", lambda name, root=None: cut)
    return cut


@pytest.mark.parametrize("scheme", ["content", "noise", "unrelated"])
def test_embed_writes_model_triggers_and_history(scheme, run, small, tmp_path):
    options = ("--scheme", scheme, "--epochs", 2, "--triggers", 12, "--levels", 2, "--samples", 1, "--label", -1)
    out = run("embed", *options, "--architecture", "cnn-2layer", "--out", "run")
    assert "keep them secret" in out
    folder = tmp_path / "run"
    assert sorted(p.name for p in folder.iterdir()) == [
        "embed.json",
        "history.csv",
        "model.safetensors",
        "triggers.npz",
    ]
    triggers = load_triggers(folder / "triggers.npz")
    assert len(triggers) == 12
    assert triggers.random_labels
    assert triggers.scheme == scheme
    assert json.loads((folder / "embed.json").read_text())["levels"] == 2
    rows = list(csv.DictReader((folder / "history.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[0]["noisy_trigger_loss"]) == 0 < float(rows[1]["noisy_trigger_loss"])
    model = hf.load_model(folder / "model.safetensors")
    new = hf.make_model("cnn-2layer", seed=0)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), new.parameters(), strict=True))
    with pytest.raises(InputError, match="use --force"):
        run("embed", *options, "--out", "run")
    if scheme == "content":
        run("embed", "run/model.safetensors", *options, "--architecture", "cnn-2layer", "--out", "run", "--force")


def test_certify_writes_a_certificate_that_verify_reads(run, files, tmp_path):
    model, triggers = files
    options = ("--sigma", 0.2, "--n", 100, "--radius", 0.1, "--radius", 0.2)
    out = run("certify", model, triggers, *options, "--out", "c")
    assert "100 copies, 30 triggers, confidence 0.99 of each radius" in out
    assert "batch-norm" in out
    values = json.loads((tmp_path / "c" / "certificate.json").read_text())
    want = noisy_accuracies(hf.load_model(model), load_triggers(triggers), sigma=0.2, n=100).sort().values
    assert values["right"] == want.tolist()
    assert values["radii"] == [0.1, 0.2]
    proof = ("--certificate", "c/certificate.json")
    out = run("verify", model, triggers, "--sigma", 0.2, "--n", 20, "--original", model, *proof)
    assert "black-box" in out
    assert "white-box" in out
    assert "chosen labels" in out
    assert "white-box" not in run("verify", model, triggers)
    with pytest.raises(InputError, match="give --sigma"):
        run("verify", model, triggers, *proof)
    with pytest.raises(InputError, match="use --force"):
        run("certify", model, triggers, *options, "--out", "c")


def test_a_stopped_certification_goes_on(run, files, tmp_path):
    model, triggers = files
    options = ("--sigma", 0.2, "--n", 60, "--radius", 0.1, "--out", "c")
    run("certify", model, triggers, *options)
    whole = (tmp_path / "c" / "copies.txt").read_text()
    (tmp_path / "c" / "certificate.json").unlink()
    (tmp_path / "c" / "copies.txt").write_text("\n".join(whole.split("\n")[:20]))  # as if it was killed
    with pytest.raises(InputError, match="is there already"):
        run("certify", model, triggers, *options)
    run("certify", model, triggers, *options, "--resume")
    assert (tmp_path / "c" / "copies.txt").read_text() == whole


@pytest.mark.parametrize("method", ["ftll", "pruning", "parameter-pgd"])
def test_attack_logs_and_leaves_the_model_file(method, run, files, small, tmp_path):
    model, triggers = files
    before = (tmp_path / model).read_bytes()
    out = run("attack", model, triggers, "--method", method, "--epochs", 2, "--n", 5, "--sigma", 0.2)
    assert "black-box: " in out
    assert (tmp_path / model).read_bytes() == before
    folder = tmp_path / "runs" / f"watermark-{method}"
    rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    assert len(rows) == (3 if method == "ftll" else 2)
    assert float(rows[0]["distance"]) == 0 < float(rows[1]["distance"])
    assert (folder / "attacked.safetensors").is_file()
    with pytest.raises(InputError, match="use --force"):
        run("attack", model, triggers, "--method", method)


def test_each_learning_rate_has_a_folder_of_its_own(run, files, tmp_path):
    model, triggers = files
    rates = ("--lr", 1e-4, "--lr", 0.01)
    out = run("attack", model, triggers, "--epochs", 1, "--n", 5, "--sigma", 0.2, *rates, "--out", "tried")
    assert "learning rate 0.0001" in out
    assert "learning rate 0.01" in out
    far = []
    for rate in ("0.0001", "0.01"):
        folder = tmp_path / "tried" / f"lr-{rate}"
        assert (folder / "attacked.safetensors").is_file()
        far.append(float(list(csv.DictReader((folder / "log.csv").read_text().splitlines()))[-1]["distance"]))
    assert far[0] < far[1]
    with pytest.raises(InputError, match="use --force"):
        run("attack", model, triggers, *rates, "--out", "tried")


def test_halves_share_nothing(small):
    owner, attacker = halves(small, True)
    assert len(owner) + len(attacker) == 200
    assert not (owner.x[:, None] == attacker.x[None]).flatten(2).all(2).any()
    assert all(part is small.train for part in halves(small, False))


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("certify", "m.safetensors", "t.npz", "--n", 50, "--radius", 0.9), InputError, "take n >= "),
        (("certify", "m.safetensors", "t.npz", "--sigma", 0), InputError, "sigma"),
        (("certify", "m.safetensors", "t.npz", "--confidence", 1), InputError, "confidence"),
        (("certify", "m.safetensors", "none.npz"), StorageError, "there is no file"),
        (("attack", "m.safetensors", "t.npz", "--method", "prunning"), InputError, "Did you mean 'pruning'"),
        (("embed", "--scheme", "noises"), InputError, "Did you mean 'noise'"),
        (("embed", "--noise", -1), InputError, "noise"),
        (("embed", "--label", 10), InputError, "outside the classes 0 to 9"),
    ],
)
def test_bad_input_is_refused(args, error, message, run, files):
    with pytest.raises(error, match=message):
        run(*args)
