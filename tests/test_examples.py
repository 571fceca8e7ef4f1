"""Every script and notebook in examples/ runs and says what it promises, with small settings."""

import importlib.util
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import holdfast

FOLDER = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_example_has_a_test_and_is_short():
    tests = Path(__file__).read_text()
    for path in FOLDER.glob("*.py"):
        assert f'load("{path.stem}")' in tests
        assert path.stem == "demo" or len(path.read_text().splitlines()) <= 40


def run_notebook(name, folder, monkeypatch):
    """Run all cells in `folder`; return what each of them showed, in text and in HTML."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(holdfast.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two tests at a time share the cores
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": os.fspath(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [output.get("text") or output["data"].get("text/plain", "") for output in outputs]
    return texts, [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]


def test_each_notebook_has_a_test_and_no_outputs():
    tests = Path(__file__).read_text()
    for path in FOLDER.glob("*.ipynb"):
        assert f'run_notebook("{path.stem}"' in tests
        cells = nbformat.read(path, as_version=4).cells
        assert [cell for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)] == []


def test_the_notebook_of_an_own_model_shows_the_bracket(tmp_path, monkeypatch):
    texts, pages = run_notebook("audit_own_model", tmp_path, monkeypatch)
    (audit,) = [text for text in texts if text.startswith("Audit: ")]
    assert "100.0 % right unchanged" in audit
    assert sum("data:image/svg+xml" in page and "<th>attacked</th>" in page for page in pages) == 1
    assert any("<th>certified_by</th>" in page for page in pages)
    assert r"\toprule" in texts[-1]
    assert (tmp_path / "runs" / "shapes" / "report.html").is_file()


def test_the_notebook_of_two_trainings_shows_that_robust_training_helps(tmp_path, monkeypatch):
    texts, pages = run_notebook("train_attack_certify", tmp_path, monkeypatch)
    assert any("Training history of 3 epochs" in text for text in texts)
    proved = [
        tuple(map(int, re.findall(r"(\d+) of 50", line))) for line in "".join(texts).splitlines() if "proved" in line
    ]
    assert len(proved) == 3
    assert proved[-1][1] > proved[-1][0]
    (compared,) = [text for text in texts if text.startswith("Comparison: ")]
    standard, robust = (float(share) for share in re.findall(r"PGD-40 ([\d.]+) %", compared))
    assert robust > standard + 30
    assert sum("data:image/svg+xml" in page for page in pages) == 2


def test_attack_lists_broken_inputs(capsys):
    load("attack").main(epochs=1, n=40)
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("broken: ")
    assert 1 <= len(rows) <= 5
    for row in rows:
        label, after = row.split(": a ")[1].split(", now taken for a ")
        assert label != after


def test_certify_patch_proves_less_for_larger_patches(capsys):
    load("certify_patch").main(epochs=1, n=20, largest=3)
    rows = capsys.readouterr().out.splitlines()
    proved = [float(row.split()[1].rstrip("%")) for row in rows]
    assert len(proved) == 3
    assert 0 < proved[0] < 100
    assert proved == sorted(proved, reverse=True)
    assert rows[1].endswith("at all 729 places")


def test_own_model_brackets_and_writes_a_report(capsys, tmp_path):
    load("own_model").main(steps=100, n=40, out=tmp_path / "run")
    out = capsys.readouterr().out
    assert "of the 40 " in out
    assert "change of 0.03: " in out
    assert (tmp_path / "run" / "report.html").is_file()


def test_train_recipe_applies_its_overrides(capsys, tmp_path):
    load("train_recipe").main(epochs=1, validation=0.9, out=tmp_path)
    assert "epoch 1: " in capsys.readouterr().out
    recipe = (tmp_path / "recipe.toml").read_text()
    assert 'threat = "linf:0.05"' in recipe
    assert "steps = 3" in recipe


def test_subnetwork_says_how_small_the_file_is_and_what_is_proved(capsys):
    load("subnetwork").main(epochs=1, validation=0.95, n=20)
    shown = capsys.readouterr().out
    assert "2,688 of 268,800 weights" in shown
    assert "the same logits: True" in shown
    assert "proved right at 0.01: " in shown
    assert shown.count("of the inputs unused") == 3


def test_pyramid_draws_the_levels(capsys, tmp_path):
    load("pyramid").main(epochs=1, validation=0.95, n=10, out=tmp_path)
    shown = capsys.readouterr().out
    assert shown.count("mean corruption error") == 2
    assert (tmp_path / "levels.png").read_bytes().startswith(b"\x89PNG")


def test_nonuniform_2d_draws_the_boxes(capsys, tmp_path):
    load("nonuniform_2d").main(steps=100, points=3, out=tmp_path / "plane.svg")
    assert "times as large" in capsys.readouterr().out
    assert (tmp_path / "plane.svg").read_text().startswith("<svg")


def test_two_moons_compares_traces_over_seeds(capsys):
    load("two_moons").main(seeds=2, epochs=3, width=8)
    rows = capsys.readouterr().out.splitlines()
    pattern = r"(\w+): trace (\S+) \((\S+) to (\S+)\); below Standard with (\d) of 2 seeds"
    found = [re.fullmatch(pattern, row).groups() for row in rows]
    assert [arm for arm, *_ in found] == ["Standard", "Top", "Full"]
    for _, mean, low, high, _ in found:
        assert 0 < float(low) <= float(mean) <= float(high)
    assert float(found[0][2]) < float(found[0][3])  # the seeds make a difference
    assert found[0][4] == "0"


def test_masked_gradients_fool_plain_pgd_alone(capsys):
    load("masked_gradients").main(epochs=1, n=30)
    bare, masked = capsys.readouterr().out.splitlines()
    honest, hidden = ([int(share) for share in re.findall(r"(\d+)%", row)] for row in (bare, masked))
    assert honest[0] < 80
    assert hidden[0] > honest[0] + 20
    assert hidden[1] == pytest.approx(honest[1], abs=4)  # rounding moves a decision at most
    assert "which is reliable" in bare
    assert "which is suspicious" in masked
    for mask in ("vanishing-gradients", "step-function", "saturated-loss"):
        assert mask in masked


def test_nearest_brackets_the_radius(capsys):
    load("nearest").main(epochs=1, n=4)
    _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4
    for _, digit, below, above, _, after, _ in map(str.split, rows):
        assert digit != after
        assert float(below) <= float(above) < 0.5


def test_break_defences_breaks_them(capsys):
    load("break_defences").main(epochs=1, n=30, steps=10, restarts=4)
    shares = [int(share) for share in re.findall(r"(\d+)%", capsys.readouterr().out)]
    assert len(shares) == 8
    for clean, unaware, aware in (shares[2:5], shares[5:8]):
        assert clean > unaware > aware


SMALL = {"n": 8, "n_pgd": 30, "epochs": 1, "validation": 0.9}


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """The folder of a finished small demo."""
    out = tmp_path_factory.mktemp("demo")
    load("demo").demo(out, **SMALL)
    return out


def test_demo_puts_both_models_on_one_page(demo_run):
    page = (demo_run / "report.html").read_text()
    assert "mnist-mini-standard" in page
    assert "mnist-mini-at" in page
    assert "8 inputs" in page


def test_demo_run_again_repeats_nothing(demo_run, capsys):
    files = [*demo_run.glob("*/model.safetensors"), *demo_run.glob("*/checkpoints/last.pt")]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert len(before) == 4
    load("demo").demo(demo_run, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in files} == before
    out = capsys.readouterr().out
    assert out.count("was trained before") == 2
    assert "of the 8 " in out
    assert out.count("under PGD with 40 steps at linf:0.1") == 2
    assert f"report: {demo_run / 'report.html'}" in out


def test_demo_goes_on_with_an_interrupted_training(demo_run, tmp_path):
    get_model = load("demo").get_model
    folder = tmp_path / "run"
    first = get_model("mnist-mini-standard", folder, epochs=1, validation=0.9)
    (folder / "model.safetensors").unlink()  # as if it was killed before the second epoch
    second = get_model("mnist-mini-standard", folder, epochs=2, validation=0.9)
    assert second.history[0] == first.history[0]
    assert len(second.history) == 2
    assert get_model("mnist-mini-standard", folder) is None


def test_demo_starts_over_where_no_checkpoint_was_written_yet(tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    result = load("demo").get_model("mnist-mini-standard", tmp_path, epochs=1, validation=0.9)
    assert len(result.history) == 1


def test_demo_turns_an_error_into_one_line(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr("sys.argv", ["demo.py", "--out", str(file), "--epochs", "1"])
    with pytest.raises(SystemExit, match=r"^error: "):
        load("demo").main()


def test_certified_landscape_draws_smoothness_and_a_path(capsys, tmp_path):
    load("certified_landscape").main(steps=6, every=3, out=tmp_path / "l")
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(":")[0] for row in rows] == ["IBP", "CROWN-IBP"]
    assert all("barrier" in row for row in rows)
    assert (tmp_path / "l" / "smoothness.svg").read_text().count("<polyline") == 10
    assert (tmp_path / "l" / "path.svg").read_text().count("<polyline") == 2


def test_two_moons_reject_compares_two_ways_to_say_no_over_seeds(capsys, tmp_path):
    load("two_moons_reject").main(seeds=2, epochs=30, out=tmp_path / "m")
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(":")[0] for row in rows] == ["gloro", "centroid"]
    for row in rows:
        shares = [float(share) for share in re.findall(r"([\d.]+)%", row)]
        assert len(shares) == 6
        assert all(low <= high for low, high in zip(shares[::2], shares[1::2], strict=True))
    for name in ("gloro-0", "gloro-1", "centroid-0", "centroid-1"):
        assert "<svg" in (tmp_path / "m" / f"{name}.svg").read_text()


def test_detection_says_what_is_proved_and_what_an_attack_leaves(capsys):
    load("detection").main(scenes=64, epochs=1, images=2, n=60)
    *scenes, last = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("scene ") for line in scenes) == 2
    least, attacked = (float(word.rstrip("%,")) for word in re.findall(r"\d+%", last))
    assert 0 <= least <= attacked <= 100


def test_smoothing_proves_less_at_larger_radii(capsys):
    load("smoothing").main(epochs=1, inputs=10, n=1000)
    first, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"right: \d+ of 10, abstained: \d+", first)
    proved = [int(row.split()[2]) for row in rows]
    assert len(proved) == 3
    assert 0 < proved[0] <= 10
    assert proved == sorted(proved, reverse=True)


def test_watermark_survives_the_worst_change_that_was_found(capsys):
    load("watermark").main(copies=100)
    first, proved, attacked = capsys.readouterr().out.splitlines()
    clean, triggers = (float(word) for word in re.findall(r"([\d.]+)%", first))
    assert clean > 60
    assert triggers > 50
    least, worst = (float(re.findall(r"(\d+)%", line)[0]) for line in (proved, attacked))
    assert 0 < least <= worst


def test_auction_brackets_its_regret(capsys):
    load("auction").main(iterations=60, width=8, profiles=5)
    _, regret, largest = capsys.readouterr().out.splitlines()
    ascent, found, proved = (float(word) for word in re.findall(r"0\.\d+", regret))
    assert max(ascent, found) <= proved
    assert proved <= float(re.findall(r"0\.\d+", largest)[0])


def test_explain_draws_digits_and_measures_the_explanations(capsys, tmp_path):
    load("explain").main(epochs=1, n=2, out=tmp_path / "e")
    _, *rows = capsys.readouterr().out.splitlines()
    faith = {row.split()[0]: float(row.split()[-1]) for row in rows[:3]}
    assert faith["big"] < faith["saliency"]
    assert "boundary to class" in rows[3]
    assert (tmp_path / "e" / "digits.svg").read_text().count("<image") == 8


def test_onnx_model_audits_the_file(capsys):
    load("onnx_model").main(epochs=1, n=10)
    first, second = capsys.readouterr().out.splitlines()
    assert float(first.split(": ")[1]) < 1e-4
    assert "of the 10 " in second


def test_wedge_is_flat_in_width_and_can_be_poisoned(capsys, tmp_path):
    load("wedge").main(tmp_path / "w.svg", units=(4, 20), guesses=60_000)
    lines = capsys.readouterr().out.splitlines()
    good = [float(re.search(r"guessed: ([\d.]+)", line)[1]) for line in lines if "guessed" in line]
    assert len(good) == 2
    assert min(good) > 0.7
    assert lines[3].endswith("test points: 0.00")
    assert (tmp_path / "w.svg").read_text().startswith("<svg")


def test_the_random_network_is_attacked_by_its_draws(capsys, monkeypatch):
    data = holdfast.load_data("mnist-mini")
    few = holdfast.Dataset(data.name, data.train[:200], data.test, data.classes)
    monkeypatch.setattr(holdfast, "load_data", lambda name: few)
    whole = holdfast.train
    short = {"epochs": 1, "attack.steps": 1, "evaluate.attack_steps": 0}
    monkeypatch.setattr(holdfast, "train", lambda name, epochs: whole(name, data=few, progress=False, **short))
    load("random_network").main(epochs=1, inputs=4, steps=2, samples=2)
    said = capsys.readouterr().out
    assert "right by the mean softmax of 20 draws" in said
    assert "minimum over all" in said
    assert "the ensemble has no certificate" in said
