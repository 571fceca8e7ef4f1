"""The command line as a user meets it: what it prints, its exit codes, and one line for every mistake."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import save_file
from torch import nn

import holdfast as hf
from holdfast import registry
from holdfast.cli import COMMANDS, load
from holdfast.cli.methods import default_text, method_card, source
from holdfast.data.draw import sample
from holdfast.training import parse_override

SUBCOMMANDS = [
    *("data list", "data get", "explain pictures", "explain locality", "explain trust"),
    *(f"analyze {name}" for name in ("pac-bayes", "lipschitz", "tightness", "difficulty")),
    *(f"watermark {name}" for name in ("embed", "certify", "verify", "attack")),
]
SOURCE = Path(hf.__file__).parent
TINY = ["epochs=1", "validation=0.95", "evaluate.count=20", "evaluate.attack_steps=2"]


def settings(*pairs):
    return [word for pair in pairs for word in ("--set", pair)]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "linear.safetensors"
    hf.save_model(hf.make_model("linear", seed=0), path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished tiny training."""
    out = tmp_path_factory.mktemp("trained") / "run"
    hf.train("mnist-mini-standard", out=out, progress=False, **dict(parse_override(text) for text in TINY))
    return out


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_help_of_every_command(holdfast, command):
    code, out, _ = holdfast(*command.split(), "--help")
    assert code == 0
    assert f"{command} [OPTIONS]" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_no_word_of_a_help_text_is_taken_for_markup(name):
    """The terminal shows texts as markup, in which a word in square brackets, such as a section, vanishes."""
    command = load(name)
    for part in (command, *getattr(command, "commands", {}).values()):
        for text in (part.help, *(getattr(option, "help", None) for option in part.params)):
            assert text is None or Text.from_markup(text).plain == text


def test_help_lists_every_command(holdfast):
    code, out, _ = holdfast("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)


def test_methods_lists_all_or_one_kind(holdfast):
    code, everything, _ = holdfast("methods")
    assert code == 0
    assert all(method.name in everything for method in hf.methods())
    _, attacks, _ = holdfast("methods", "attack")
    assert "pgd" in attacks
    assert "certify" not in attacks


def test_methods_shows_one_method_with_its_options(holdfast):
    code, out, _ = holdfast("methods", "attack", "square")
    assert code == 0
    method = registry.get("attack", "square")
    words = " ".join(out.split())  # whatever the width of the screen
    assert method.summary in words
    assert method.reference in words
    assert "holdfast/attacks/square.py" in words
    for option in method.typed_options.values():
        row = next(line for line in out.splitlines() if line.startswith(option.name + " "))
        assert option.text in row
        assert row.rstrip().endswith(default_text(option))


@pytest.mark.parametrize("method", hf.methods(), ids=lambda method: f"{method.kind}-{method.name}")
def test_every_method_can_be_shown_in_full(method):
    text = io.StringIO()
    Console(file=text, width=300).print(method_card(method))
    assert (SOURCE.parent / source(method)).is_file()
    assert all(option.text in text.getvalue() for option in method.typed_options.values())


def test_models_and_data_and_recipes_are_listed(holdfast):
    assert "small-star" in holdfast("models")[1]
    code, out, _ = holdfast("data", "list")
    assert code == 0
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines()[1:] if line.strip()}
    assert rows["mnist-mini"] == "yes"
    assert rows["cifar10"] == "no"
    assert "mnist-mini-at" in holdfast("train", "--list")[1]
    assert "mnist-mini-at" in holdfast("train")[1]


def test_train_then_audit_then_report(holdfast, tmp_path):
    code, out, _ = holdfast("train", "mnist-mini-standard", "--out", "run", *settings(*TINY))
    assert code == 0
    assert "epoch=1 " in out
    assert "model: run/model.safetensors" in out

    small = ["--n", 6, "--budgets", 2]
    code, out, _ = holdfast("audit", "run/model.safetensors", *small)
    assert code == 0
    assert "6 test images keep" in " ".join(out.split())
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("audit-run-mnist-mini-linf-0.1-standard-6-")
    assert f"report: runs/{folder.name}/report.html" in out
    assert (folder / "report.html").is_file()

    code, out, _ = holdfast("audit", "run/model.safetensors", *small, "--threat", "l2:0.5", "--out", "second")
    assert code == 0
    assert "Euclidean distance of up to 0.5" in " ".join(out.split())
    code, out, _ = holdfast("report", f"runs/{folder.name}", "second", "--out", "both.html")
    assert code == 0
    assert "report: both.html" in out
    page = (tmp_path / "both.html").read_text()
    assert "linf:0.1" in page
    assert "l2:0.5" in page


def test_audit_of_weights_alone(holdfast, tmp_path):
    save_file(hf.make_model("linear", seed=0).state_dict(), tmp_path / "weights.safetensors")
    code, out, _ = holdfast(
        *("audit", "weights.safetensors", "--architecture", "linear", "--n", 10, "--budgets", 1, "--out", "run")
    )
    assert code == 0
    assert "of the 10 test images keep" in " ".join(out.split())


def test_certify_prints_the_count_and_writes_each_input(holdfast, refused, model, tmp_path):
    run = ["certify", model, "--threat", "linf:0.001", "--method", "ibp", "--n", 60]
    code, out, _ = holdfast(*run, "--out", "rows.csv")
    assert code == 0
    data = sample("mnist-mini", 60)
    proved = hf.certify(hf.load_model(model), data.x, data.y, hf.Linf(0.001), "ibp")
    assert f"certified {int(proved.certified.sum())} of 60 " in out
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["certified"] == "True" for row in rows] == proved.certified.tolist()
    assert [int(row["label"]) for row in rows] == data.y.tolist()

    assert holdfast(*run, "--out", "rows.json")[0] == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["certified"] for row in rows] == proved.certified.tolist()
    assert "must end in .csv or .json, got 'rows.txt'" in refused(*run, "--out", "rows.txt")
    assert "cannot write no/such/folder.csv" in refused(*run, "--out", "no/such/folder.csv")
    assert "Did you mean 'ibp'?" in refused("certify", model, "--method", "ibb")


def test_bounds_prints_every_logit_of_one_input(holdfast, refused, model):
    code, out, _ = holdfast("bounds", model, "--threat", "linf:0.01", "--method", "ibp", "--input", 3)
    assert code == 0
    rows = [line.split() for line in out.splitlines()[1:] if line.strip()]
    assert len(rows) == 10
    assert all(float(low) < float(logit) < float(high) for _, logit, low, high, *_ in rows)
    assert [row[-1] == "label" for row in rows].index(True) == int(hf.load_data("mnist-mini").test.y[3])
    assert "the test split has 2000 inputs" in refused("bounds", model, "--input", 2000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threat", "linff:0.1"], "Did you mean 'linf'?"),
        (["--threat", "linf:-0.1"], "must be a finite number >= 0, got -0.1"),
        (["--threat", "linf:a"], "cannot read the threat 'linf:a'"),
        (["--threat", "linf:0"], "give a budget above zero"),
        (["--attack", "pdg"], "Did you mean 'pgd'?"),
        (["--certify", "ibb"], "Did you mean 'ibp'?"),
        (["--data", "mnist-mimi"], "Did you mean 'mnist-mini'?"),
        (["--data", "cifar10"], "holdfast data get cifar10"),
        (["--budgets", "0"], "budgets must be at least 1, got 0"),
        (["--architecture", "small-starr"], "Did you mean 'small-star'?"),
        (["--data", "two-moons"], "the model failed on a batch of shape"),
        (["--out", "file/run"], "file/run"),
    ],
)
def test_audit_refuses_bad_options(refused, model, tmp_path, options, message):
    (tmp_path / "file").write_text("")
    assert message in refused("audit", model, "--n", 10, "--budgets", 1, *options)


def test_audit_refuses_bad_model_files(refused, tmp_path):
    assert "missing.safetensors" in refused("audit", "missing.safetensors")
    torch.save(nn.Linear(784, 10), tmp_path / "pickled.pt")
    assert "pickled.pt" in refused("audit", "pickled.pt")
    (tmp_path / "corrupt.safetensors").write_bytes(b"\x00\x01\x02" * 50)
    assert "corrupt.safetensors" in refused("audit", "corrupt.safetensors")
    (tmp_path / "model.h5").write_bytes(b"")
    assert "model.h5" in refused("audit", "model.h5")


def test_audit_refuses_another_architecture(refused, tmp_path):
    save_file(hf.make_model("linear", seed=0).state_dict(), tmp_path / "weights.safetensors")
    assert "weights.safetensors" in refused("audit", "weights.safetensors", "--architecture", "small-star")
    assert "holds weights" in refused("audit", "weights.safetensors")


def test_audit_refuses_the_folder_of_another_audit(holdfast, refused, model):
    run = ["audit", model, "--n", 10, "--budgets", 1, "--out", "run"]
    assert holdfast(*run)[0] == 0
    assert "seed" in refused(*run, "--seed", 1)


def test_report_refuses_what_is_no_audit(holdfast, refused, model):
    assert "there is no finished audit in 'nowhere'" in refused("report", "nowhere")
    holdfast("audit", model, "--n", 10, "--budgets", 1, "--out", "run")
    assert "cannot write no/such/folder.html" in refused("report", "run", "--out", "no/such/folder.html")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["mnist-mini-standrd"], "Did you mean 'mnist-mini-standard'?"),
        (["missing.toml"], "missing.toml"),
        (["mnist-mini-at", "--set", "epoch=3"], "Did you mean 'epochs'?"),
        (["mnist-mini-at", "--set", "epochs=0"], "epochs"),
        (["mnist-mini-at", "--set", "epochs"], "write key=value"),
        (["mnist-mini-at", "--set", "threat=linf:-1"], "threat"),
        (["mnist-mini-at", "--out", "file/run"], "file/run"),
        (["mnist-mini-at", "--out", "file"], "is a file"),
        (["mnist-mini-at", "--out", "empty", "--resume"], "there is no run to resume in empty"),
    ],
)
def test_train_refuses_bad_options(refused, tmp_path, args, message):
    (tmp_path / "file").write_text("")
    assert message in refused("train", *args)


def test_train_refuses_to_overwrite_or_to_resume_a_damaged_run(refused, trained):
    before = (trained / "model.safetensors").read_bytes()
    assert "already holds a run" in refused("train", "mnist-mini-standard", "--out", trained)
    checkpoint = trained / "checkpoints" / "last.pt"
    whole = checkpoint.read_bytes()
    try:
        checkpoint.write_bytes(whole[: len(whole) // 2])
        assert "is damaged" in refused("train", trained, "--resume", *settings("epochs=2"))
    finally:
        checkpoint.write_bytes(whole)
    assert (trained / "model.safetensors").read_bytes() == before


def test_methods_and_data_refuse_unknown_names(refused):
    assert "unknown kind 'attacks'" in refused("methods", "attacks")
    assert "unknown attack method 'pdg'. Did you mean 'pgd'" in refused("methods", "attack", "pdg")
    assert "Did you mean 'cifar10'?" in refused("data", "get", "cifar1")


def test_usage_errors_exit_with_two(holdfast):
    code, _, err = holdfast("audit")
    assert code == 2
    assert "Missing argument" in err
    assert holdfast("no-such-command")[0] == 2


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"no {path} after {seconds} s"
        time.sleep(0.02)


def test_ctrl_c_saves_and_the_run_can_be_resumed(holdfast, tmp_path):
    long = settings("epochs=50", "batch_size=4", "validation=0.9", "evaluate.count=20", "evaluate.attack_steps=1")
    command = [sys.executable, "-m", "holdfast", "train", "mnist-mini-standard", "--out", "run", *long]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(tmp_path / "run" / "checkpoints" / "last.pt", process)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.count("\n") == 1
    assert "saved. Go on with: holdfast train run --resume" in err
    assert not (tmp_path / "run" / "model.safetensors").exists()

    code, out, _ = holdfast("train", "run", "--resume", *settings("epochs=1"))
    assert code == 0
    assert "model: run/model.safetensors" in out
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_audit_of_a_smoothed_model(holdfast, refused, trained):
    model = trained / "model.safetensors"
    code, out, _ = holdfast(
        *("audit", model, "--threat", "l2:0.1", "--sigma", 0.25, "--n", 4, "--budgets", 1, "--out", "smoothed")
    )
    assert code == 0
    assert "wrong with probability 0.001 at most" in " ".join(out.split())
    assert "sigma is the standard deviation" in refused("audit", model, "--threat", "l2:0.1", "--sigma", "0")
    assert "audit with --sigma, with --certify smoothing" in refused(
        "audit", model, "--threat", "l2:0.1", "--certify", "smoothing"
    )


def test_the_lines_of_help_are_those_of_the_commands():
    for name, text in COMMANDS.items():
        assert (load(name).help or "").splitlines()[0] == text, name


def test_help_and_completion_do_not_wait_for_torch():
    code = "import sys; from holdfast.cli import app; print('torch' in sys.modules, 'numpy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "False False"


def test_the_version_is_shown(holdfast):
    code, shown, _ = holdfast("--version")
    assert (code, shown.strip()) == (0, f"holdfast {hf.__version__}")


OWN = """
from torch import nn

class MyNet(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture
def own(tmp_path):
    """A class in a file, a checkpoint of a training script, and a folder of pictures."""
    Image = pytest.importorskip("PIL.Image")
    (tmp_path / "mynet.py").write_text(OWN)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(20, 5), nn.ReLU(), nn.Linear(5, 2))
    state = {f"module.layers.{name}": value for name, value in layers.state_dict().items()}
    torch.save({"model": state, "epoch": 7}, tmp_path / "weights.pt")
    for label in range(2):
        (tmp_path / "photos" / "ab"[label]).mkdir(parents=True)
        for i in range(10):
            pixels = torch.randint(0, 256, (4, 5), dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "photos" / "ab"[label] / f"{i}.png")
    return ["weights.pt", "--architecture", "mynet.py:MyNet", "--arch-args", "width=5", "--data", "photos"]


def test_a_class_of_the_users_own_is_attacked_certified_and_audited(holdfast, own):
    normal = ["--mean", "0.5", "--std", "0.25"]
    code, shown, error = holdfast("audit", *own, *normal, "--threat", "linf:2/255", "--budget", "quick", "--n", 4)
    assert code == 0, error
    assert "report:" in shown
    for command in (["attack", "--method", "fgsm"], ["certify", "--method", "ibp"], ["bounds"]):
        code, _, error = holdfast(command[0], *own, *normal, *command[1:], "--threat", "linf:2/255")
        assert code == 0, error


def test_what_is_wrong_with_a_class_of_the_users_own_is_one_line(holdfast, own):
    weights, data = own[0], own[-2:]
    for words, message in (
        (["--architecture", "mynet.py:MyNett"], "has no class or function 'MyNett'. Did you mean 'MyNet'"),
        (["--architecture", "mynet.py:MyNet"], "'layers.1.weight' has shape (5, 20), the model needs (3, 20)"),
        (["--architecture", "mynet.py:MyNet", "--mean", "a"], "cannot read --mean 'a'"),
        (["--architecture", "mynet.py:MyNet", "--mean", "0.5"], "give --mean and --std together"),
        (
            ["--architecture", "mynet.py:MyNet", "--mean", "0.5,0.4", "--std", "1"],
            "--mean has 2 values; number of channels of the inputs: 1",
        ),
        (["--arch-args", "width=5"], "--arch-args are arguments of an --architecture"),
        (["--architecture", "mynet.py:MyNet", "--key", "modle"], "has no entry 'modle'. Did you mean 'model'"),
    ):
        code, _, error = holdfast("certify", weights, *words, *data)
        assert code == 2
        assert message in error
        assert error.count("\n") == 1


def test_values_out_of_range_are_answered_with_options_of_the_command_line(holdfast, own, tmp_path):
    np.savez(tmp_path / "bytes.npz", x=np.full((4, 1, 4, 5), 200.0), y=np.arange(4) % 2)
    code, _, error = holdfast("certify", *own[:-1], "bytes.npz")
    assert code == 2
    assert "say with --mean and --std how the model normalises them" in error
    assert "low=" not in error


def test_a_key_into_a_file_of_bare_weights_is_to_be_left_out(holdfast, own, tmp_path):
    torch.save({"layers.1.weight": torch.zeros(2, 2)}, tmp_path / "weights.pt")
    code, _, error = holdfast("certify", *own, "--key", "model")
    assert code == 2
    assert "it holds the weights themselves; leave out --key" in error
