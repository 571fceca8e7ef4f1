"""`holdfast compare` as a user meets it: what it prints and writes, how it goes on after a kill, how it refuses."""

import json

import pytest

import holdfast as hf
from holdfast.utils.files import write_json

TINY = {"epochs": 1, "validation": 0.95, "evaluate.count": 20, "evaluate.attack_steps": 2, "model.name": "linear"}


@pytest.fixture
def columns():
    return 80


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of two finished tiny trainings, for the same threat."""
    folder = tmp_path_factory.mktemp("trained")
    hf.train("mnist-mini-standard", out=folder / "plain", progress=False, threat="linf:0.1", **TINY)
    hf.train("mnist-mini-at", out=folder / "[robust]", progress=False, **TINY)
    return [folder / "plain", folder / "[robust]"]


def test_help_names_the_command_and_its_options(holdfast):
    assert "compare" in holdfast("--help")[1]
    code, out, _ = holdfast("compare", "--help")
    assert code == 0
    for name in ("n", "out", "data", "threat", "attack", "force"):
        assert f"--{name}" in out


def test_compare_prints_the_table_and_writes_the_files(holdfast, trained, tmp_path):
    run = ["compare", *trained, "--inputs", 20, "--attack", "cascade"]
    code, out, err = holdfast(*run)
    assert (code, err) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"table: runs/{folder.name}/compare.md\nplot: runs/{folder.name}/compare.svg\n" in out
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".csv", ".json", ".md", ".svg"]
    rows = json.loads((folder / "compare.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["plain", "[robust]"]
    for row in rows:
        shown = next(line for line in out.splitlines() if line.startswith(row["name"]))
        for score in row["scores"].values():
            assert f"{100 * score['accuracy']:.1f} %" in shown
    assert "Accuracy on 20 test inputs of mnist-mini at linf:0.1" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    code, again, _ = holdfast(*run)
    assert (code, again) == (0, out)


def test_another_comparison_needs_force_or_another_folder(holdfast, refused, trained):
    run = ["compare", *trained, "--attack", "none", "--out", "both"]
    assert holdfast(*run, "--inputs", 10)[0] == 0
    assert "'both' already holds another comparison (other settings: data, inputs, drawn)" in refused(
        *run, "--inputs", 12
    )
    code, out, _ = holdfast(*run, "--inputs", 12, "--force")
    assert code == 0
    assert "Accuracy on 12 test inputs" in out


def test_a_killed_comparison_says_how_to_go_on(holdfast, trained, tmp_path, monkeypatch):
    write = write_json

    def stops(path, content):
        write(path, content)
        raise KeyboardInterrupt

    run = ["compare", *trained, "--attack", "none", "--inputs", 10, "--out", "both"]
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.runs.compare.write_json", stops)
        code, _, err = holdfast(*run)
    assert (code, err) == (130, "stopped; finished batches are in both. Go on: same command\n")
    (stored,) = (tmp_path / "both" / "results").iterdir()
    before = stored.stat().st_mtime_ns
    assert holdfast(*run)[0] == 0
    assert stored.stat().st_mtime_ns == before
    assert len(list((tmp_path / "both" / "results").iterdir())) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attack", "autoatack"], "Did you mean 'autoattack'?"),
        (["--threat", "linff:0.1"], "Did you mean 'linf'?"),
        (["--data", "mnist-mimi"], "Did you mean 'mnist-mini'?"),
        (["--data", "two-moons"], "does not fit the data 'two-moons'"),
        (["--out", "file"], "is a file"),
        (["--out", "file/run"], "cannot write"),
        (["nowhere"], "there is no training run in 'nowhere'"),
    ],
)
def test_bad_options_are_refused_in_one_line(refused, trained, tmp_path, options, message):
    (tmp_path / "file").write_text("")
    given = [] if "--attack" in options else ["--attack", "none"]
    assert message in refused("compare", *trained, "--inputs", 5, *given, *options)


def test_usage_errors_exit_with_two(holdfast, trained):
    code, _, err = holdfast("compare")
    assert code == 2
    assert "Missing argument" in err
    assert holdfast("compare", *trained, "--inputs", 0)[0] == 2
