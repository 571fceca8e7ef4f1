"""What the tests of several commands share: a small model on disk, and runs of the command line in this process."""

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app, main


@pytest.fixture
def columns():
    """Width of the terminal: wide enough that nothing is cut."""
    return 300


@pytest.fixture
def holdfast(monkeypatch, capsys, tmp_path, columns):
    """Runs the command line in this process and in an empty folder; returns exit code, output and error output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))

    def run(*args):
        monkeypatch.setattr("sys.argv", ["holdfast", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    return run


@pytest.fixture
def refused(holdfast):
    """Runs a command that must fail in one line; returns the message."""

    def run(*args):
        code, _, err = holdfast(*args)
        assert code == 2, err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return run


@pytest.fixture(scope="session")
def means(tmp_path_factory):
    """Path of a linear classifier by the nearest mean of each class of mnist-mini: good, and needs no training."""
    path = tmp_path_factory.mktemp("means") / "means.safetensors"
    network, train = hf.make_model("linear", seed=0), hf.load_data("mnist-mini").train
    with torch.no_grad():
        centres = torch.stack([train.x[train.y == c].mean(0).flatten() for c in range(10)])
        layer = next(m for m in network.modules() if isinstance(m, nn.Linear))
        layer.weight.copy_(centres)
        layer.bias.copy_(-centres.square().sum(1) / 2)
    hf.save_model(network, path)
    return path


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs a command in an empty folder; returns what it prints, and lets its errors through."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None:
            raise result.exception
        return result.output

    return run
