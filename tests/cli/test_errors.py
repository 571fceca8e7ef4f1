"""Errors name arguments in Python, and options of the command that was run on the command line."""

import ast
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.cli import COMMANDS, load, options_of
from holdfast.data.draw import sample
from holdfast.errors import argument, either, on_command_line

SOURCE = Path(hf.__file__).parent


def named_arguments():
    """The first argument of every call of `argument` in the sources."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "argument":
                yield path.relative_to(SOURCE).as_posix(), ast.literal_eval(node.args[0])


def test_every_argument_that_an_error_names_is_an_option_of_some_command():
    known = {name for command in COMMANDS for name in options_of(load(command))}
    found = list(named_arguments())
    assert len(found) > 15
    assert [(path, name) for path, name in found if name not in known] == []


def test_an_argument_is_written_as_its_reader_writes_it():
    assert (argument("method", "ibp"), argument("out"), either("a", "b")) == ("method='ibp'", "out=", "a")
    with on_command_line(lambda name: f"--{name}"):
        assert (argument("method", "ibp"), argument("out"), either("a", "b")) == ("--method ibp", "--out", "b")
        assert argument("force", True) == "--force"
        assert argument("certify", None) == "--certify none"
    assert argument("out") == "out="


@pytest.fixture
def weights(tmp_path):
    torch.save({"a": {"w": torch.zeros(1)}, "b": {"w": torch.zeros(1)}}, tmp_path / "two.pt")
    torch.save(hf.make_model("linear", seed=0).state_dict(), tmp_path / "plain.pt")
    return tmp_path


def test_weights_are_asked_for_in_the_words_of_the_reader(command, weights):
    with pytest.raises(hf.InputError, match=r"Say which one with --key$"):
        command("certify", "two.pt", "--architecture", "linear")
    with pytest.raises(hf.InputError, match=r"Say which one with key=$"):
        hf.load_model(weights / "two.pt", architecture="linear")
    with pytest.raises(
        hf.InputError, match="no architecture; give --architecture, a name of `holdfast models` or FILE"
    ):
        command("audit", "plain.pt")
    with pytest.raises(hf.InputError, match="give it as model="):
        hf.load_model(weights / "plain.pt")


def test_weights_that_do_not_fit_name_the_first_three_that_differ(command, weights):
    model = hf.make_model("small-star", input_shape=(1, 28, 28), classes=10, seed=0)
    torch.save({name: torch.zeros(2, *value.shape) for name, value in model.state_dict().items()}, "wide.pt")
    first = list(model.state_dict())
    with pytest.raises(hf.InputError) as refused:
        command("certify", Path("wide.pt").resolve(), "--architecture", "small-star")
    text = str(refused.value)
    assert all(f"'{name}' has shape (2, " in text for name in first[:3])
    assert f"'{first[3]}'" not in text
    assert f"({len(first)} differ)" in text


def test_a_method_is_advised_by_the_option_of_the_command(command, means):
    with pytest.raises(hf.UnsupportedError, match="See `holdfast methods certify` for others"):
        command("certify", means, "--threat", "patch:diamond:5", "--method", "crown")
    with pytest.raises(hf.UnsupportedError, match=r"See hf.methods\('certify'\) for others"):
        hf.certify(hf.load_model(means), torch.zeros(1, 1, 28, 28), torch.tensor([0]), "l1:1", "patch")
    with pytest.raises(hf.InputError, match=r"--certify smoothing proves .* audit with --sigma"):
        command("audit", means, "--threat", "l2:0.1", "--certify", "smoothing")


def test_an_audit_has_no_method_but_certify():
    from holdfast.cli import OTHER_WORDS

    known = options_of(load("audit"))
    assert "method" not in known
    assert known[OTHER_WORDS["method"]] == "--certify"


def test_n_counts_inputs_in_every_command_that_has_it_and_samples_are_samples():
    def visible(command):
        parts = getattr(command, "commands", {"": command}).values()
        return [(p.name, p.opts) for part in parts for p in part.params if not getattr(p, "hidden", False)]

    for name in COMMANDS:
        for parameter, texts in visible(load(name)):
            assert not {"--n", "-n"} & set(texts) or (parameter, {"--n", "-n"} <= set(texts)) == ("n", True), name
            assert "--inputs" not in texts or name == "explain", name
    for name in ("audit", "attack", "certify", "compare", "radius", "nearest", "detect", "analyze", "explain"):
        assert options_of(load(name))["n"] == "--n"


def test_the_spellings_of_before_still_work(command, means):
    assert "of 3 (" in command("certify", means, "--threat", "linf:0.001", "--method", "ibp", "--inputs", 3)
    shown = command(
        "certify", means, "--threat", "l2:0.1", "--method", "smoothing", "--sigma", 0.25, "--inputs", 2, "--n", 300
    )
    assert "of 2 (" in shown
    new = command(
        "certify", means, "--threat", "l2:0.1", "--method", "smoothing", "--sigma", 0.25, "-n", 2, "--samples", 300
    )
    assert new == shown
    assert "of 2 (" in command("attack", means, "--threat", "linf:0.01", "--method", "fgsm", "--inputs", 2)


def test_quiet_silences_progress(command, means, monkeypatch):
    monkeypatch.setattr("holdfast.utils.progress.EVERY", -1.0)
    words = ["certify", means, "--threat", "linf:0.001", "--method", "ibp", "-n", 2]
    assert "certify linf:0.001: 2 of 2 (100%)" in command(*words)
    assert "certify linf:0.001:" not in command(*words, "--quiet")
    assert "certify linf:0.001: 2 of 2 (100%)" in command(*words)


def test_a_patch_without_a_proof_names_its_worst_place_and_class(command, means):
    shown = command("certify", means, "--threat", "patch:12x12", "-n", 8, "--method", "patch", "--out", "p.csv")
    data, model = hf.load_data("mnist-mini"), hf.load_model(means)
    taken = sample(data, 8)
    found = hf.certify(model, taken.x, taken.y, "patch:12x12", "patch")
    i = int((~found.certified).nonzero()[0])
    (row, column), rival = found.worst_place[i].tolist(), int(found.worst_class[i])
    assert (
        f"not proved: input {taken.index[i]}, worst with the patch at row {row}, column {column}, against class {rival}"
        in shown
    )
    assert Path("p.csv").read_text().splitlines()[0].endswith("worst_row,worst_column,worst_class")
