"""`holdfast attack` as a user meets it: what it prints and writes, how it goes on after a kill, how it refuses."""

import csv
import json
from importlib import import_module

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast as hf
from holdfast.data.draw import sample

module = import_module("holdfast.runs.attack_run")
MOONS = ["--data", "two-moons", "--threat", "l2:0.05", "--method", "pgd", "--option", "steps=3"]


def means_classifier(name):
    """The linear model that assigns each input to the nearest mean of a class: fair accuracy without training."""
    data = hf.load_data(name)
    classes, flat = len(data.classes), data.train.x.flatten(1)
    model = hf.make_model("linear", input_shape=tuple(data.train.x.shape[1:]), classes=classes, seed=0)
    means = torch.stack([flat[data.train.y == k].mean(0) for k in range(classes)])
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    with torch.no_grad():
        layer.weight.copy_(means)
        layer.bias.copy_(-means.square().sum(1) / 2)
    return model


@pytest.fixture
def digits(tmp_path):
    hf.save_model(means_classifier("mnist-mini"), tmp_path / "digits.safetensors")
    return tmp_path / "digits.safetensors"


@pytest.fixture
def moons(tmp_path):
    hf.save_model(means_classifier("two-moons"), tmp_path / "moons.safetensors")
    return tmp_path / "moons.safetensors"


def read_rows(folder):
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def cells(out):
    """The lines of the table as {first column: rest}."""
    return {
        key.strip(): rest.strip() for key, rest in (line.split("  ", 1) for line in out.splitlines() if "  " in line)
    }


def test_help_names_the_command_and_its_options(holdfast):
    assert "attack" in holdfast("--help")[1]
    code, out, _ = holdfast("attack", "--help")
    assert code == 0
    for name in ("threat", "method", "option", "n", "quiet", "seed", "out", "resume", "png", "minimum", "norm"):
        assert f"--{name}" in out


def test_attack_prints_and_writes_what_it_found(holdfast, digits, tmp_path):
    run = [
        "attack",
        digits,
        "--threat",
        "linf:0.1",
        "--method",
        "pgd",
        "--option",
        "steps=5",
        "--option",
        "loss=margin",
    ]
    code, out, err = holdfast(*run, "--inputs", 120, "--seed", 4, "--out", "run")
    assert (code, err) == (0, "")
    data = sample("mnist-mini", 120, seed=4)
    want = hf.attack(hf.load_model(digits), data.x, data.y, hf.Linf(0.1), "pgd", seed=4, steps=5, loss="margin")
    clean, held = sum(name != "clean" for name in want.by), int((~want.success).sum())
    assert 0 < held < clean < 120
    table = cells(out)
    assert table["clean accuracy"] == f"{clean} of 120 ({clean / 120:.1%})"
    assert table["accuracy under attack, linf:0.1"] == f"{held} of 120 ({held / 120:.1%})"
    assert table["broken by pgd"] == str(clean - held)
    assert table["misclassified unchanged"] == str(120 - clean)
    assert table["gradient evaluations"].split()[0] == str(int(want.gradients.sum()))
    assert table["queries"].split()[0] == str(int(want.queries.sum()))
    assert "results: run/results.csv" in out

    assert [row["by"] for row in read_rows(tmp_path / "run")] == list(want.by)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["options"], summary["seed"], summary["model"]) == ({"steps": 5, "loss": "margin"}, 4, "digits")
    with np.load(tmp_path / "run" / "examples.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["success"], want.success.numpy())
        np.testing.assert_allclose(arrays["x_adv"], want.x_adv.numpy(), atol=1e-6)


def test_defaults_and_the_folder_of_a_run(holdfast, moons, tmp_path):
    assert holdfast("attack", moons, "--data", "two-moons", "--n", 10)[0] == 0
    assert (tmp_path / "runs" / "attack-moons-linf-0.1-cascade" / "summary.json").is_file()
    assert holdfast("attack", moons, "--data", "two-moons", "--n", 10, "--minimum")[0] == 0
    assert (tmp_path / "runs" / "attack-moons-minimum-l2-auto" / "summary.json").is_file()


def test_weights_alone_and_a_file_of_ones_own_data(holdfast, tmp_path):
    model = means_classifier("two-moons")
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    test = hf.load_data("two-moons").test
    x, y = test.x[:20].numpy(), test.y[:20].numpy()
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    run = ["attack", "weights.safetensors", "--architecture", "linear", "--data", "./mine.npz", "--method", "fgsm"]
    code, _, err = holdfast(*run, "--out", "run")
    assert code == 0, err
    assert len(read_rows(tmp_path / "run")) == 20


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_minimum_gives_the_exact_distance_of_a_linear_model(holdfast, moons, tmp_path, norm):
    code, out, _ = holdfast(
        *("attack", moons, "--data", "two-moons", "--minimum", "--norm", norm, "--inputs", 40, "--out", "run")
    )
    assert code == 0
    model, test = hf.load_model(moons), sample("two-moons", 40)
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    w = (layer.weight[1] - layer.weight[0]).detach()
    logits = model(test.x).detach()
    right = logits.argmax(1) == test.y
    exact = (logits[:, 1] - logits[:, 0]).abs() / w.norm(p=1 if norm == "linf" else 2)
    rows = read_rows(tmp_path / "run")
    got = torch.tensor([float(row["distance"]) for row in rows])
    torch.testing.assert_close(got[right], exact[right], rtol=0.02, atol=1e-5)
    assert (got[~right] == 0).all()
    assert cells(out)["examples found"].startswith(f"{int(right.sum())} of {int(right.sum())} ")
    assert f"median {norm} distance" in cells(out)


def kill_after(monkeypatch, calls, error=KeyboardInterrupt):
    real, seen = module.run_attack, []

    def stops(*args, **kwargs):
        if len(seen) == calls:
            raise error
        seen.append(kwargs["index"].tolist())
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "run_attack", stops)
    return seen


def test_killed_run_resumes_to_the_same_results(holdfast, refused, moons, tmp_path, monkeypatch):
    run = ["attack", moons, *MOONS, "--inputs", 250]
    assert holdfast(*run, "--out", "whole")[0] == 0
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        code, _, err = holdfast(*run, "--out", "killed")
    assert code == 130
    assert err == "stopped; finished batches are in killed. Go on: same command with --resume\n"
    assert "already holds a run" in refused(*run, "--out", "killed")
    assert "seed: was 0, is 1" in refused(*run, "--out", "killed", "--resume", "--seed", 1)
    with monkeypatch.context() as patch:
        seen = kill_after(patch, 99)
        assert holdfast(*run, "--out", "killed", "--resume")[0] == 0
    assert [i for batch in seen for i in batch] == list(range(100, 250))

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert (killed / "results.csv").read_text() == (whole / "results.csv").read_text()
    with np.load(killed / "examples.npz") as ours, np.load(whole / "examples.npz") as theirs:
        assert ours.files == theirs.files
        for name in ours.files:
            np.testing.assert_array_equal(ours[name], theirs[name])


def test_any_failure_keeps_the_finished_batches(holdfast, moons, tmp_path, monkeypatch):
    kill_after(monkeypatch, 2, hf.StorageError("the disk is gone"))
    code, _, err = holdfast("attack", moons, *MOONS, "--inputs", 250, "--out", "run")
    assert (code, err) == (2, "error: the disk is gone\n")
    assert sorted(path.name for path in (tmp_path / "run" / "parts").iterdir()) == ["00000000.npz", "00000100.npz"]


def test_png_writes_only_pictures_that_still_fool_the_model(holdfast, refused, digits, moons, tmp_path):
    images = pytest.importorskip("PIL.Image")
    run = ["attack", digits, "--method", "fgsm", "--threat", "linf:0.1", "--inputs", 60, "--png"]
    code, out, _ = holdfast(*run, "--out", "run")
    assert code == 0
    model, test = hf.load_model(digits), hf.load_data("mnist-mini").test
    files = sorted((tmp_path / "run" / "png").iterdir())
    lost = json.loads((tmp_path / "run" / "summary.json").read_text())["png"]
    broken = {int(row["index"]) for row in read_rows(tmp_path / "run") if row["by"] == "fgsm"}
    assert 0 < len(files) == lost["written"] == len(broken) - lost["right_again"] - lost["outside"]
    assert f"pictures: {len(files)} in run/png; lost to 8 bits: {lost['right_again']} classified right again, 0 " in out
    for path in files:
        i = int(path.stem)
        assert i in broken
        assert path.name == f"{i:06d}.png"
        shown = torch.from_numpy(np.asarray(images.open(path)).astype(np.float32) / 255)[None, None]
        assert int(model(shown).argmax()) != int(test.y[i])
        assert float((shown - test.x[i]).abs().max()) <= 0.1 + 1 / 510 + 1e-6
    assert "png needs images" in refused("attack", moons, *MOONS, "--png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "pdg"], "Did you mean 'pgd'?"),
        (["--method", "ddn", "--threat", "linf:0.1"], "method 'ddn' does not handle the threat 'linf:0.1'"),
        (["--threat", "linff:0.1"], "Did you mean 'linf'?"),
        (["--threat", "linf:-1"], "must be a finite number >= 0"),
        (["--data", "two-mons"], "Did you mean 'two-moons'?"),
        (["--data", "mnist-mini"], "the model failed on a batch of shape"),
        (["--method", "pgd", "--option", "step=3"], "has no option 'step'. Did you mean 'steps'?"),
        (["--method", "pgd", "--option", "steps=few"], "option 'steps' of the method 'pgd': expected an integer"),
        (["--method", "pgd", "--option", "steps=2.5"], "expected an integer >= 1, got 2.5"),
        (["--method", "pgd", "--option", "steps=0"], "expected an integer >= 1, got 0"),
        (["--method", "pgd", "--option", "loss=cee"], "unknown loss 'cee'"),
        (["--method", "pgd", "--option", "steps"], "cannot read the option 'steps'; write name=value"),
        (["--minimum", "--threat", "l2:1"], "--minimum looks for the nearest example and has no --threat"),
        (["--norm", "l2"], "--norm goes with --minimum"),
        (["--minimum", "--norm", "l3"], "unknown norm 'l3'"),
        (["--minimum", "--norm", "linf", "--method", "ddn"], "'ddn' minimises l2, not 'linf'"),
        (["--minimum", "--method", "pgd"], "unknown method 'pgd' for the nearest example"),
        (["--out", "file"], "is a file"),
        (["--out", "file/run"], "cannot write"),
        (["--resume"], "there is no run to resume"),
    ],
)
def test_attack_refuses_bad_options(refused, moons, tmp_path, options, message):
    (tmp_path / "file").write_text("")
    data = [] if "--data" in options else ["--data", "two-moons"]
    assert message in refused("attack", moons, "--inputs", 10, *data, *options)


def test_usage_errors_exit_with_two(holdfast, moons):
    code, _, err = holdfast("attack")
    assert code == 2
    assert "Missing argument" in err
    assert holdfast("attack", moons, "--inputs", 0)[0] == 2
    assert holdfast("attack", "missing.safetensors")[0] == 2
