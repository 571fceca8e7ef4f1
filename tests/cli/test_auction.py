"""The command `holdfast auction`."""

import json

import pytest
from typer.testing import CliRunner

from holdfast.cli.auction import app
from holdfast.errors import InputError, StorageError

SMALL = ["--set", "hidden=[8]", "--set", "iterations=12", "--set", "batch_size=16", "--quiet"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("auction") / "run"
    assert "revenue" in run("train", "auction-1x2", *SMALL, "--out", str(path))
    return path


def test_train_certify_and_report(folder):
    said = run("certify", str(folder), "-n", "3", "--tolerance", "0.01", "--ascent", "100")
    assert "mean regret between" in said
    assert "gradient ascent gains" in said
    found = json.loads((folder / "regret.json").read_text())
    assert found["threat_set"] == {"bids": [0.0, 1.0], "closed": True, "bidders": 1, "items": 2}
    assert found["samples"] == len(found["profiles"]) == 3
    assert all(p["found"][0] <= p["proved"][0] for p in found["profiles"])
    assert found["gap"] <= 0.0101
    assert found["method"] == "branch and bound"
    assert 0 <= found["summary"]["ratio"] <= 1
    run("report", str(folder), "-n", "2", "--tolerance", "0.05", "--ascent", "0")
    assert "classical mechanisms" in (folder / "report.html").read_text()


def test_values_from_a_file(folder, tmp_path):
    (tmp_path / "v.csv").write_text("0.5,0.25\n0.125,1\n")
    out = tmp_path / "r.json"
    run(
        "certify",
        str(folder),
        "--values",
        str(tmp_path / "v.csv"),
        "--tolerance",
        "0.05",
        "--ascent",
        "0",
        "--out",
        str(out),
    )
    found = json.loads(out.read_text())
    assert [p["values"] for p in found["profiles"]] == [[[0.5, 0.25]], [[0.125, 1.0]]]
    assert found["seed"] is None
    assert found["fresh"]


def test_values_of_the_training_say_nothing_about_others(tmp_path):
    csv = tmp_path / "v.csv"
    csv.write_text("0.5,0.25\n0.125,1\n")
    run("train", "auction-1x2", *SMALL, "--values", str(csv), "--out", str(tmp_path / "run"))
    quick = ["--values", str(csv), "--tolerance", "0.05", "--ascent", "0"]
    said = run("certify", str(tmp_path / "run"), *quick)
    assert "trained on these values" in said
    assert "Hoeffding" not in said
    assert not json.loads((tmp_path / "run" / "regret.json").read_text())["fresh"]
    run("report", str(tmp_path / "run"), *quick)
    assert "say nothing about others" in (tmp_path / "run" / "report.html").read_text()


def test_programs_for_a_student(tmp_path):
    run("train", "auction-1x2-student", *SMALL, "--set", "teacher=5", "--out", str(tmp_path))
    said = run("certify", str(tmp_path), "-n", "2", "--exact", "--ascent", "20")
    assert "mean regret between" in said
    found = json.loads((tmp_path / "regret.json").read_text())
    assert found["method"].startswith("mixed-integer programs")
    assert len(found["summary"]["proved_by_bidder"]) == 1
    assert found["gap"] < 1e-4


def test_bad_input(folder, tmp_path):
    with pytest.raises(InputError, match="--tolerance"):
        run("certify", str(folder), "--tolerance", "0")
    with pytest.raises(StorageError, match="no model file"):
        run("certify", str(tmp_path))
    with pytest.raises(InputError, match="auction-1x2"):
        run("train", "auction-9x9")
