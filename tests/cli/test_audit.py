"""`holdfast audit` with several threats, a plan, groups, and an exit code for continuous integration."""

import json
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.audits.saved import load_audit
from holdfast.cli import main
from holdfast.cli.audit import audit_folder
from holdfast.data.draw import sample


@pytest.fixture
def holdfast(monkeypatch, capsys, tmp_path):
    """Runs an audit of a linear model in an empty folder; returns exit code, output and error output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    hf.save_model(hf.make_model("linear", seed=0), tmp_path / "linear.safetensors")
    small = ["audit", "linear.safetensors", "--n", "12", "--budgets", "1", "--budget", "quick", "--out", "run"]

    def run(*args):
        monkeypatch.setattr("sys.argv", ["holdfast", *small, *args])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    return run


def test_threats_plan_and_groups(holdfast, tmp_path):
    (tmp_path / "about.csv").write_text("id,writer\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(2000)))
    code, out, _ = holdfast("--threat", "linf:0.01", "--threat", "l2:0.1", "--group", "about.csv:writer")
    assert code == 0
    assert "every pixel may change by up to 0.01" in " ".join(out.split())
    assert "Euclidean distance of up to 0.1" in " ".join(out.split())
    body = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert [bracket["threat"] for bracket in body["brackets"]] == ["linf:0.01", "l2:0.1"]
    assert body["settings"]["plan"] == "quick"
    assert body["groups"] == {"writer": ["ab"[i % 2] for i in sample("mnist-mini", 12).index.tolist()]}
    assert body["drawn"] == "12 of 2,000, drawn by seed 0 with the classes balanced"
    assert "12 of 2,000, drawn by seed 0" in " ".join(out.split())
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"results.csv", "badge.svg", "model-card.md"}


def test_fail_under_is_an_exit_code(holdfast):
    threat = ["--threat", "linf:0.001"]
    code, _, err = holdfast(*threat, "--fail-under", "certified=0")
    assert (code, err) == (0, "")
    code, out, err = holdfast(*threat, "--fail-under", "certified=1", "--fail-under", "clean=0.99")
    assert code == 1
    assert "report: run/report.html" in out
    assert err.count("failed: ") == 2
    assert "at linf:0.001 is below 1" in err
    assert "clean accuracy" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fail-under", "certified"], "cannot read --fail-under 'certified'; write certified=0.8"),
        (["--fail-under", "proved=0.5"], "cannot read --fail-under"),
        (["--fail-under", "clean=80"], "cannot read --fail-under"),
        (["--group", "about.csv"], "write FILE.csv:COLUMN"),
        (["--group", "missing.csv:a"], "cannot read --group 'missing.csv:a'"),
        (["--group", "about.csv:writter"], "Did you mean 'writer'?"),
        (["--group", "about.csv:writer"], "'writer' has 1 values for 12"),
        (["--threat", "linf:0.1", "--threat", "linf:0.1"], "is given twice"),
        (["--engine", "spark"], "engine must be 'local' or 'ray'"),
        (["--address", "here:1"], "address goes with --engine ray"),
    ],
)
def test_bad_options_are_refused_in_a_line(holdfast, tmp_path, options, message):
    (tmp_path / "about.csv").write_text("id,writer\n1,a\n")
    code, _, err = holdfast(*options)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_default_folder_is_another_one_for_another_audit():
    usual = (Path("a/model.safetensors"), "mnist", ["linf:8/255"], "standard", 500, (None, None))
    others = [
        (Path("b/model.safetensors"), *usual[1:]),
        (Path("a/weights.pt"), *usual[1:]),
        (Path("b/weights.pt"), *usual[1:]),
        (usual[0], "photos/", *usual[2:]),
        (*usual[:2], ["linf:2/255"], *usual[3:]),
        (*usual[:2], ["linf:8/255", "l2:1"], *usual[3:]),
        (*usual[:3], "quick", 500, (None, None)),
        (*usual[:4], 100, (None, None)),
        (*usual[:5], (0.25, None)),
        (*usual[:5], (0.5, None)),
    ]
    found = [str(audit_folder(*case)) for case in (usual, *others)]
    assert found[0] == "runs/audit-a-mnist-linf-8_255-standard-500"
    assert len(set(found)) == len(found)
    assert found == [str(audit_folder(*case)) for case in (usual, *others)]  # so that a killed audit goes on
    assert all(name.count("/") == 1 for name in found)


def test_shifted_data_are_a_section_of_the_report(holdfast, tmp_path):
    code, out, _ = holdfast("--threat", "linf:0.01", "--certify", "none", "--attack", "fgsm", "--shift")
    assert code == 0
    assert "mean corruption error" in out
    shift = json.loads((tmp_path / "run" / "audit.json").read_text())["settings"]["shift"]
    assert len(shift["rows"]) == 75
    assert shift["inputs"] == 12
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count('<h2 id="shift">Shifted data</h2>') == 1
    assert "jpeg-compression" in page
    assert load_audit(tmp_path / "run").to_html().count('id="shift"') == 1


def test_shifted_data_need_images_and_say_so_before_the_audit(holdfast, tmp_path):
    hf.save_model(hf.make_model("linear", input_shape=(2,), classes=2, seed=0), tmp_path / "linear.safetensors")
    code, _, err = holdfast("--data", "two-moons", "--threat", "linf:0.01", "--shift")
    assert code != 0
    assert "images of shape (B, C, H, W)" in err
    assert not (tmp_path / "run").exists()
