"""Files that version 0.1.0 wrote still work; earlier/README.md says what they are."""

import csv
import json
import shutil
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf
from earlier.make import ATTACK, AUDIT, CERTIFY, COMPARE, PROOF, SMOOTHING
from holdfast.audits import load_audit

EARLIER = Path(__file__).parent / "earlier"
EXPECTED = json.loads((EARLIER / "expected.json").read_text())


@pytest.fixture(autouse=True)
def _copy(tmp_path, monkeypatch):
    """Every test works in a copy of the folder."""
    shutil.copytree(EARLIER, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path / "earlier")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def holdfast(monkeypatch, capsys):
    """Runs the command line in this process, without an error; returns what it prints."""
    (command,) = entry_points(group="console_scripts", name="holdfast")

    def run(*words):
        monkeypatch.setattr("sys.argv", ["holdfast", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            command.load()()
        out, err = capsys.readouterr()
        assert not stop.value.code, err
        return out

    return run


@contextmanager
def passes():
    """Counts the passes through models that `make_model` or `load_model` made."""
    seen = []

    def count(module, inputs, output):
        seen.extend([1] if hasattr(module, "architecture") else [])

    hook = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        yield seen
    finally:
        hook.remove()


def read_json(path):
    return json.loads(Path(path).read_text())


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def same_rows(rows, others, leave_out=()):
    """Whether tables agree: texts to the letter, numbers up to rounding on another machine."""
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert set(row) >= set(other)
        for key in set(other) - set(leave_out):
            try:
                assert float(row[key]) == pytest.approx(float(other[key]), rel=1e-3, abs=1e-5), key
            except ValueError:
                assert row[key] == other[key], key


def logits(model):
    with torch.no_grad():
        return model(hf.load_data("data.npz").test.x[:8])


def same_logits(model, name="mlp", atol=1e-5):
    torch.testing.assert_close(logits(model), torch.tensor(EXPECTED["logits"][name]), rtol=1e-4, atol=atol)


TIMES = ("seconds", "images_per_second", "peak_memory_mb")


def test_a_data_file_keeps_its_classes_and_its_range():
    data = hf.load_data("data.npz")
    assert (len(data.train), len(data.test), list(data.classes)) == (80, 120, ["top", "middle", "bottom"])
    with np.load("data.npz") as arrays:
        np.testing.assert_allclose(data.test.x.numpy(), arrays["x_test"] / 255, atol=1e-6)
        assert data.test.y.tolist() == arrays["y_test"].tolist()


@pytest.mark.parametrize("name", list(EXPECTED["logits"]))
def test_a_saved_model_gives_the_same_logits(name):
    model = hf.load_model(f"models/{name}.safetensors")
    assert not model.training
    same_logits(model, name)


def test_a_saved_model_that_is_saved_again_has_the_same_tensors_and_architecture():
    for name in EXPECTED["logits"]:
        model = hf.load_model(f"models/{name}.safetensors")
        hf.save_model(model, "again.safetensors")
        again = hf.load_model("again.safetensors")
        assert again.architecture == model.architecture
        state = again.state_dict()
        assert list(state) == list(model.state_dict())
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


def test_state_dicts_and_onnx_files_give_the_same_logits():
    new = hf.make_model("mlp", input_shape=(1, 4, 5), classes=3, hidden=[12], seed=9)
    same_logits(hf.load_model("models/weights.pt", new))
    same_logits(hf.load_model("models/whole.pt"))
    pytest.importorskip("onnx")
    same_logits(hf.load_model("models/mlp.onnx"))


@pytest.mark.parametrize("recipe", ["own.toml", "training/own"])
def test_a_recipe_of_ones_own_trains_the_same_model(recipe):
    result = hf.train(recipe, out="again", progress=False)
    same_rows(read_rows("again/history.csv"), read_rows("training/own/history.csv"), TIMES)
    same_logits(result.model, atol=1e-3)
    same_logits(hf.load_model("training/own/model.safetensors"))


def check_resumed(before):
    rows = read_rows("training/interrupted/history.csv")
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[: len(before)] == before  # with the times of the earlier run: they were not trained again
    same_rows(rows, read_rows("training/own/history.csv"), TIMES)
    same_logits(hf.load_model("training/interrupted/model.safetensors"), atol=1e-3)


def test_an_interrupted_training_goes_on_to_the_model_of_a_whole_one():
    before = read_rows("training/interrupted/history.csv")
    assert [row["epoch"] for row in before] == ["1", "2", "3"]
    with passes() as seen:
        result = hf.train("training/interrupted", out="training/interrupted", resume=True, progress=False)
    assert 0 < len(seen) < 100  # a whole run takes 211
    assert [row["epoch"] for row in result.history] == [1, 2, 3, 4, 5]
    check_resumed(before)


def test_the_command_line_resumes_an_interrupted_training(holdfast):
    before = read_rows("training/interrupted/history.csv")
    assert "model: training/interrupted/model.safetensors" in holdfast("train", "training/interrupted", "--resume")
    check_resumed(before)


def test_a_finished_training_goes_on_for_another_epoch():
    before = read_rows("training/own/history.csv")
    hf.train("training/own", out="training/own", resume=True, epochs=6, progress=False)
    rows = read_rows("training/own/history.csv")
    assert rows[:5] == before
    assert [row["epoch"] for row in rows[5:]] == ["6"]


HEADLINE = (
    "Of the 10 test images, between 30 % and 40 % keep their label when every pixel may change by up to 0.15; exactly "
    "80 % when all pixels together may change by a Euclidean distance of up to 0.3."
)


def check_audit(folder):
    """Its numbers are those of the finished audit."""
    found = read_json(f"{folder}/audit.json")
    assert found["headline"] == HEADLINE
    assert found["clean_accuracy"] == EXPECTED["audit"]["clean_accuracy"]
    for bracket, expected in zip(found["brackets"], EXPECTED["audit"]["brackets"], strict=True):
        for key in ("threat", "budgets"):
            assert bracket[key] == expected[key]
        for level, other in zip(bracket["levels"], expected["levels"], strict=True):
            for key, value in other.items():
                assert level[key] == (pytest.approx(value) if key.endswith("interval") else value), key
    return found


def test_a_report_is_made_of_a_finished_audit(holdfast):
    assert "report: page.html" in holdfast("report", "audit/finished", "--out", "page.html")
    page = Path("page.html").read_text()
    assert HEADLINE in page
    for bracket in EXPECTED["audit"]["brackets"]:
        assert bracket["threat"] in page
        for level in bracket["levels"]:
            assert f"{100 * level['certified_accuracy']:.1f} %" in page
            assert f"{100 * level['attacked_accuracy']:.1f} %" in page


def test_a_finished_audit_says_that_it_took_the_first_inputs():
    assert load_audit("audit/finished").drawn == "the first 10"


def test_a_finished_audit_is_not_run_again(holdfast):
    before = read_json("audit/finished/audit.json")
    holdfast(*AUDIT, "--out", "audit/finished")
    found = check_audit("audit/finished")
    assert found["created"] == before["created"] == EXPECTED["audit"]["created"]
    for bracket, other in zip(found["brackets"], before["brackets"], strict=True):
        assert bracket["records"] == other["records"]
        assert bracket["seconds"] == other["seconds"]
    assert HEADLINE in Path("audit/finished/report.html").read_text()


def test_a_finished_audit_is_opened_from_python():
    model, data = hf.load_model("models/mlp.safetensors"), hf.load_data("data.npz")
    how = {"budget": "quick", "n": 10, "budgets": 2, "progress": False}
    result = hf.audit(model, data, ["linf:0.15", "l2:0.3"], out="audit/finished", **how)
    assert result.created == EXPECTED["audit"]["created"]
    assert result.headline == HEADLINE
    assert (result.drawn, result.total) == ("the first 10 of 120", 120)
    for bracket, expected in zip(result.brackets, EXPECTED["audit"]["brackets"], strict=True):
        assert list(bracket.certified) == [level["certified_accuracy"] for level in expected["levels"][1:]]
        assert list(bracket.attacked) == [level["attacked_accuracy"] for level in expected["levels"][1:]]


def test_a_killed_audit_goes_on_to_the_numbers_of_a_whole_one(holdfast):
    started = read_json("audit/killed/progress.json")
    assert started["state"] == "running"
    assert not Path("audit/killed/audit.json").exists()
    holdfast(*AUDIT, "--out", "audit/killed")
    assert check_audit("audit/killed")["created"] == started["created"] != EXPECTED["audit"]["created"]
    assert read_json("audit/killed/progress.json")["state"] != "running"


def test_a_killed_attack_goes_on_to_the_results_of_a_whole_one(holdfast):
    with passes() as seen:
        holdfast(*ATTACK, "--out", "attack/killed", "--resume")
    assert 0 < len(seen) < 11  # a whole run takes 11
    first = Path("parts/00000000.npz")
    assert ("attack/killed" / first).read_bytes() == (EARLIER / "attack/killed" / first).read_bytes()
    same_rows(read_rows("attack/killed/results.csv"), read_rows("attack/finished/results.csv"))
    with np.load("attack/killed/examples.npz") as ours, np.load("attack/finished/examples.npz") as theirs:
        assert set(ours.files) >= set(theirs.files)
        np.testing.assert_allclose(ours["x_adv"], theirs["x_adv"], atol=1e-5)
        assert ours["success"].tolist() == theirs["success"].tolist()


def test_a_finished_attack_is_not_run_again(holdfast):
    before, summary = read_rows("attack/finished/results.csv"), read_json("attack/finished/summary.json")
    holdfast(*ATTACK, "--out", "attack/finished", "--resume")
    assert read_rows("attack/finished/results.csv") == before
    again = read_json("attack/finished/summary.json")
    same = ("inputs", "right", "held", "broken_by", "gradients", "queries", "seconds", "hashes")
    assert {key: again[key] for key in same} == {key: summary[key] for key in same}


def test_a_certificate_without_samples_proves_the_same(holdfast):
    holdfast(*CERTIFY, "--inputs", 120, "--out", "again.csv")  # it ran on the first ten; now ten would be drawn
    rows, before = read_rows("again.csv")[:10], read_rows("certify/crown.csv")
    same_rows(rows, before, ("margin",))
    for row, other in zip(rows, before, strict=True):  # version 0.1.0 lost more of the margin to rounding
        assert -1e-5 < float(row["margin"]) - float(other["margin"]) < 0.05


def test_half_done_sampling_goes_on_to_the_proofs_of_a_whole_one(holdfast):
    with np.load("certify/interrupted.csv.counts.npz") as half, np.load("certify/finished.csv.counts.npz") as whole:
        assert half["drawn"].sum() < whole["drawn"].sum()
    with passes() as seen:
        holdfast(*SMOOTHING, "--out", "certify/interrupted.csv", "--resume")
    assert 0 < len(seen) < 15  # a whole run takes 21
    same_rows(read_rows("certify/interrupted.csv"), read_rows("certify/finished.csv"))


def test_finished_sampling_is_asked_again_without_a_new_sample(holdfast):
    before = read_rows("certify/finished.csv")
    with passes() as seen:
        holdfast(*SMOOTHING, "--out", "certify/finished.csv", "--resume")
    assert len(seen) <= 2  # looks at the number of classes and at the shape of the logits; a whole run takes 21
    same_rows(read_rows("certify/finished.csv"), before)


def scores(folder):
    """The rows of a comparison, without the confidence intervals, which are of another kind by now."""
    rows = read_json(f"{folder}/compare.json")["rows"]
    for score in (score for row in rows for score in row["scores"].values()):
        del score["interval"]
    return rows


@pytest.mark.parametrize("folder", ["finished", "killed"])
def test_a_comparison_goes_on_to_the_same_table(holdfast, folder):
    stored = {path: path.read_bytes() for path in Path("compare", folder, "results").iterdir()}
    before = scores("compare/finished")
    with passes() as seen:
        out = holdfast(*COMPARE, "--out", f"compare/{folder}")
    assert len(seen) <= (2 if folder == "finished" else 1200)  # a whole one takes 2230; each model is tried once
    assert scores(f"compare/{folder}") == before
    unchanged = [path for path, content in stored.items() if path.read_bytes() == content]
    assert len(unchanged) == (2 if folder == "finished" else 1)
    for row in before:
        shown = next(line for line in out.splitlines() if line.startswith(row["name"]))
        assert all(f"{100 * score['accuracy']:.1f} %" in shown for score in row["scores"].values())


def test_a_killed_certification_of_a_watermark_goes_on_to_the_same_certificate(holdfast):
    done = Path("watermark/killed/copies.txt").read_text()
    assert 50 < len(done.splitlines()) < 150
    with passes() as seen:
        holdfast(*PROOF, "--out", "watermark/killed", "--resume")
    assert 0 < len(seen) < 150  # a whole run takes 202
    assert Path("watermark/killed/copies.txt").read_text().startswith(done)
    ours, theirs = (read_json(f"watermark/{folder}/certificate.json") for folder in ("killed", "finished"))
    assert ours.pop("weight_norm") == pytest.approx(theirs.pop("weight_norm"))
    assert {key: ours[key] for key in theirs} == theirs


def test_a_watermark_is_verified_with_its_triggers_and_its_certificate(holdfast):
    files = ("watermark/model.safetensors", "watermark/triggers.npz")
    proof = ("--original", files[0], "--certificate", "watermark/finished/certificate.json")
    lines = holdfast("watermark", "verify", *files, "--sigma", 3.0, "--n", 50, *proof).splitlines()
    black, white = (next(line.split() for line in lines if line.startswith(mode)) for mode in ("black", "white"))
    assert "100.0%" in black
    certificate = read_json("watermark/finished/certificate.json")
    assert float(white[-1]) >= certificate["certified"][0]
