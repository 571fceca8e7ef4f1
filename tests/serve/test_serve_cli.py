"""The command hands on what it was given."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import serve as cli_serve
from holdfast.errors import InputError


@pytest.fixture
def call(monkeypatch):
    """Runs the command with these words; returns what the server was started with, and what was printed."""
    app = typer.Typer()
    app.command("serve")(cli_serve.serve_command)

    def run(*words):
        seen = {}

        def fake(runs, *, announce, **how):
            announce("http://127.0.0.1:1/")
            seen.update(how, runs=runs)

        monkeypatch.setattr(cli_serve, "serve", fake)
        result = CliRunner().invoke(app, [*words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return seen, result.output

    return run


def test_defaults(call):
    seen, printed = call()
    assert seen == {"runs": Path("runs"), "host": "127.0.0.1", "port": 8787, "subject": None}
    assert printed == "open http://127.0.0.1:1/\n"


def test_a_model_to_try(call, tmp_path):
    path = hf.save_model(hf.make_model("linear", seed=0), tmp_path / "mine.safetensors")
    seen, _ = call(str(tmp_path), "--model", str(path), "--port", "0", "--host", "0.0.0.0")
    subject = seen.pop("subject")
    assert seen == {"runs": tmp_path, "host": "0.0.0.0", "port": 0}
    assert subject.name == "mine"
    assert subject.shape == (1, 28, 28)
    assert not subject.model.training


def test_an_architecture_of_nothing(call):
    with pytest.raises(InputError, match="give --model as well"):
        call("--architecture", "small-star")
