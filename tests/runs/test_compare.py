"""Runs side by side: the numbers are right, nothing is done twice, nothing is overwritten unasked, damage is named."""

import csv
import io
import json
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from scipy.stats import binom

import holdfast as hf
from holdfast.data import Dataset
from holdfast.data.draw import sample
from holdfast.runs.compare import compare, default_folder
from holdfast.runs.compare_plot import FILES, Score
from holdfast.runs.finished import Run, best_epoch, method_text
from holdfast.training import folder as files
from holdfast.utils.files import write_json, write_text
from holdfast.utils.intervals import clopper_pearson, medals
from holdfast.utils.toml import write_toml

module = import_module("holdfast.runs.compare")
EPS = 0.04
HISTORY = [
    {"epoch": 1, "validation_clean": 0.5, "validation_robust": 0.25, "seconds": 2.0, "images_per_second": 300.0},
    {"epoch": 2, "validation_clean": 0.8, "validation_robust": 0.75, "seconds": 1.0, "images_per_second": 600.0},
    {"epoch": 3, "validation_clean": 0.9, "validation_robust": 0.5, "seconds": 1.0, "images_per_second": 600.0},
]


def moons_model(shift, classes=2):
    """The nearer mean of the two moons, with the line between them moved by `shift`."""
    train = hf.load_data("two-moons").train
    model = hf.make_model("linear", input_shape=(2,), classes=classes, seed=0)
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    means = torch.stack([train.x[train.y == k].mean(0) for k in range(2)])
    with torch.no_grad():
        layer.weight.zero_()[:2] = means
        layer.bias.fill_(-9)[:2] = -means.square().sum(1) / 2 + torch.tensor([shift, 0.0])
    return model


def write_run(folder, shift=0.0, history=HISTORY, classes=2, **recipe):
    """A finished run, as `holdfast train` leaves it behind; keys that are None are left out of the recipe."""
    table = {
        "data": "two-moons",
        "threat": f"linf:{EPS}",
        "epochs": len(history),
        "objective": {"name": "at"},
        "optimizer": {"lr": 0.1},
        **recipe,
    }
    folder.mkdir(parents=True)
    write_text(folder / files.RECIPE, write_toml({key: v for key, v in table.items() if v is not None}))
    write_json(folder / files.RUN, {"data": "two-moons", "device": "cpu"})
    files.write_history(folder, history)
    hf.save_model(moons_model(shift, classes), folder / files.MODEL)
    return folder


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / "first"), write_run(tmp_path / "second", 0.05)]


def quick(runs, **options):
    return compare(runs, **{"attack": "none", "inputs": 40, "progress": False} | options)


def exact(model, inputs):
    """Inputs that a linear model classifies right, unchanged and at the worst corner of the threat."""
    test = sample("two-moons", inputs)
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    toward = layer.weight[1 - test.y] - layer.weight[test.y]
    worst = (test.x + EPS * toward.sign()).clamp(0, 1)
    with torch.no_grad():
        return [int((model(x).argmax(1) == test.y).sum()) for x in (test.x, worst)]


@pytest.mark.parametrize("inputs", [1, 20, 300])
def test_the_interval_of_a_score_covers_the_truth_as_often_as_it_says(inputs):
    ends = torch.tensor([Score(k, inputs).interval for k in range(inputs + 1)], dtype=torch.float64)
    # With no hit, or with all of them, one tail is known in closed form: (1 - p)^n = 0.025 at the end.
    tail = 0.025 ** (1 / inputs)
    assert ends[0].tolist() == pytest.approx([0.0, 1 - tail])
    assert ends[-1].tolist() == pytest.approx([tail, 1.0])
    p = torch.linspace(0.001, 0.999, 500, dtype=torch.float64)
    chance = torch.from_numpy(binom.pmf(torch.arange(inputs + 1)[None], inputs, p[:, None]))
    covered = (chance * ((ends[:, 0] <= p[:, None]) & (p[:, None] <= ends[:, 1]))).sum(1)
    assert float(covered.min()) >= 0.95


def test_accuracies_are_those_of_the_exact_worst_case(runs):
    result = quick(runs, attack="cascade", inputs=120)
    assert [row.name for row in result.rows] == ["first", "second"]
    assert (result.data, result.threat, result.attack, result.inputs) == ("two-moons", "linf:0.04", "cascade", 120)
    truths = [exact(hf.load_model(run / "model.safetensors"), 120) for run in runs]
    assert truths[0] != truths[1]
    for row, (clean, robust) in zip(result.rows, truths, strict=True):
        assert 0 < robust < clean < 120
        assert row.scores == {"clean": Score(clean, 120), "pgd": Score(robust, 120), "cascade": Score(robust, 120)}
        assert row.scores["pgd"].interval == clopper_pearson(robust, 120)


def test_autoattack_is_the_attack_unless_told_otherwise(runs):
    result = compare(runs[:1], inputs=2, progress=False)
    clean, robust = exact(hf.load_model(runs[0] / "model.safetensors"), 2)
    assert result.rows[0].scores == {"clean": Score(clean, 2), "pgd": Score(robust, 2), "autoattack": Score(robust, 2)}
    assert "AutoAttack" in result.to_markdown()
    assert "AutoAttack" in result.to_svg()


def test_the_pair_has_a_column_of_its_own(runs):
    result = compare(runs, inputs=30, attack="none", pair=True, progress=False)
    assert list(result.rows[0].scores) == ["clean", "pgd", "apgd-ce-dlr"]
    assert "APGD-CE+DLR" in result.header


def test_medals_go_by_the_column_and_not_to_a_single_run(runs):
    result = quick(runs, attack="cascade", inputs=120)
    for name in result.rows[0].scores:
        shares = [row.scores[name].accuracy for row in result.rows]
        assert result.medals(name) == medals(shares, 120)
        assert "gold" in result.medals(name)
    assert result.to_markdown().count("gold") >= 3
    assert "gold" not in quick(runs[:1]).to_markdown()


def test_figures_of_the_training_come_from_the_history(tmp_path):
    memory = [row | {"peak_memory_mb": peak} for row, peak in zip(HISTORY, (7.0, 9.5, 8.0), strict=True)]
    clean = [{key: value for key, value in row.items() if key != "validation_robust"} for row in HISTORY]
    bare = [{"epoch": 1, "seconds": 0.5}]
    folders = [write_run(tmp_path / name, history=h) for name, h in (("a", memory), ("b", clean), ("c", bare))]
    a, b, c = quick(folders, inputs=10).rows
    # 2 s at 300 images per second and 2 s at 600.
    assert (a.seconds, a.images_per_second, a.peak_memory_mb) == (4.0, 450.0, 9.5)
    assert (a.best_epoch, a.epochs, a.robust_gap) == (2, 3, 0.25)
    assert (b.peak_memory_mb, b.robust_gap) == (None, None)
    assert (c.seconds, c.images_per_second, c.best_epoch, c.robust_gap) == (0.5, None, 1, None)


@pytest.mark.parametrize(
    ("recipe", "best"),
    [
        ({}, 2),
        ({"evaluate": {"select": "clean"}}, 3),
        ({"evaluate": {"attack_steps": 0}}, 3),
        ({"objective": {"name": "standard"}}, 3),
        ({"average": {"name": "ema", "start_epoch": 2}}, 3),
        ({"average": {"name": "none", "start_epoch": 2}}, 2),
        ({"periods": [1, 3]}, 3),
        ({"a_key_of_the_future": {"name": "x"}, "objective": {"name": "of-the-future"}}, 2),
        ({"a_key_of_the_future": 1, "evaluate": {"select": "clean"}}, 3),
        ({"a_key_of_the_future": 1, "evaluate": {"select": "of-the-future"}}, 2),
    ],
)
def test_best_epoch_is_the_one_that_training_kept(tmp_path, recipe, best):
    folder = write_run(tmp_path / "run", **recipe)
    assert quick([folder], inputs=1).rows[0].best_epoch == best


def test_the_later_one_of_equal_epochs_is_the_best(tmp_path):
    history = [row | {"validation_robust": 0.5} for row in HISTORY]
    assert quick([write_run(tmp_path / "run", history=history)], inputs=1).rows[0].best_epoch == 3


def test_a_real_run_agrees_with_its_own_checkpoint(tmp_path):
    tiny = {"epochs": 3, "validation": 0.95, "evaluate.count": 40, "evaluate.attack_steps": 2, "model.name": "linear"}
    for name, seed in (("one", 1), ("two", 2)):
        trained = hf.train("mnist-mini-at", out=tmp_path / name, progress=False, seed=seed, **tiny)
    rows = quick([tmp_path / "one", tmp_path / "two"], inputs=20).rows
    for row in rows:
        best = files.read_tensors(tmp_path / row.name / files.BEST)
        assert (row.best_epoch, row.epochs) == (best["epoch"], 3)
    assert rows[1].seconds == pytest.approx(sum(epoch["seconds"] for epoch in trained.history))
    robust = [epoch["validation_robust"] for epoch in trained.history]
    assert rows[1].robust_gap == pytest.approx(max(robust) - robust[-1])
    test = sample("mnist-mini", 20)
    held = ~hf.attack(trained.model, test.x, test.y, hf.Linf(0.1), "pgd", steps=40).success
    assert rows[1].scores["pgd"].right == int(held.sum())


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ({"objective": {"name": "standard"}}, "standard"),
        ({"objective": {"name": "at", "steps": 10}, "average": {"name": "none"}}, "at (10 steps)"),
        ({"objective": {"name": "trades"}, "attack": {"name": "pgd", "steps": 7}}, "trades + pgd (7 steps)"),
        ({"objective": "at", "attack": "none", "regularizers": ["trh", {"name": "s2o"}]}, "at + trh + s2o"),
        (
            {"objective": {"name": "at"}, "regularizers": {"trh": {"weight": 1}}, "average": {"name": "swa"}},
            "at + trh + swa",
        ),
        ({"objective": {"name": "at"}, "perturb_weights": {"name": "awp"}, "unknown": {"name": "x"}}, "at + awp"),
        ({"objective": 3, "attack": None}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_method_is_read_from_any_recipe(recipe, text):
    assert method_text(recipe) == text


def test_results_are_stored_and_a_second_call_does_nothing_anew(runs, tmp_path):
    out = tmp_path / "out"
    first = quick(runs, attack="cascade", out=out)
    stored = {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    assert {path.stem for path in stored} == {row.key for row in first.rows}
    assert quick(runs, attack="cascade", out=out) == first
    assert {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()} == stored
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "results"])

    third = write_run(tmp_path / "third", -0.05)
    grown = quick([*runs, third], attack="cascade", out=out)
    assert grown.rows[:2] == first.rows
    assert all(path.stat().st_mtime_ns == time for path, time in stored.items())
    assert [row["name"] for row in json.loads((out / "compare.json").read_text())["rows"]] == [
        "first",
        "second",
        "third",
    ]


def test_a_killed_comparison_goes_on_where_it_stopped(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BATCH", 4)
    whole = quick(runs, attack="cascade", inputs=10, out=tmp_path / "whole")
    write, written = write_json, []

    def stops(path, content):
        write(path, content)
        written.append(path)
        if len(written) == 5:  # in the second of the three batches of the second attack
            raise KeyboardInterrupt

    out = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", stops)
        with pytest.raises(KeyboardInterrupt):
            quick(runs, attack="cascade", inputs=10, out=out)
    assert [path.name for path in out.iterdir()] == ["results"]
    (path,) = (out / "results").iterdir()
    body = json.loads(path.read_text())
    assert {attack: len(names) for attack, names in body["by"].items()} == {"pgd": 10, "cascade": 8}
    body["by"]["cascade"][0] = "stored"
    path.write_text(json.dumps(body))

    assert quick(runs, attack="cascade", inputs=10, out=out).rows[1] == whole.rows[1]
    again, before = json.loads(path.read_text()), json.loads((tmp_path / "whole" / "results" / path.name).read_text())
    assert again["by"]["cascade"] == ["stored", *before["by"]["cascade"][1:]]


def test_another_comparison_is_replaced_only_if_asked(runs, tmp_path):
    out = tmp_path / "out"
    quick(runs, out=out)
    before = (out / "compare.json").read_text()
    for other in ({"inputs": 20}, {"threat": "linf:0.01"}, {"attack": "cascade"}):
        with pytest.raises(hf.InputError, match=r"already holds another comparison \(other settings: .*--force"):
            quick(runs, out=out, **other)
    with pytest.raises(hf.InputError, match="of other models: second"):
        quick(runs[:1], out=out)
    assert (out / "compare.json").read_text() == before
    quick(runs[:1], out=out, force=True)
    assert len(json.loads((out / "compare.json").read_text())["rows"]) == 1
    (out / "compare.json").write_text("{")
    with pytest.raises(hf.InputError, match="it cannot be read"):
        quick(runs, out=out)
    assert len(quick(runs, out=out, force=True).rows) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(hf.InputError, match="is a file"):
        quick(runs, out=tmp_path / "file")


def test_damaged_results_are_named(runs, tmp_path):
    out = tmp_path / "out"
    key = quick(runs, out=out).rows[0].key
    path = out / "results" / f"{key}.json"
    for text in ("{", "[]", '{"by": {}}', json.dumps({"by": {"pgd": [""] * 41}})):
        path.write_text(text)
        with pytest.raises(hf.StorageError, match=f"{key}.json'.*delete the file to judge the run again"):
            quick(runs, out=out)


def test_nothing_is_written_without_a_folder(runs, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    quick(runs)
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_default_folder_belongs_to_the_models(runs, tmp_path):
    folder = default_folder(runs)
    assert folder.parent.name == "runs"
    assert folder.name.startswith("compare-")
    assert default_folder(runs[::-1]) == folder
    assert default_folder(runs[:1]) != folder


def test_every_output_holds_every_number(runs):
    result = quick(runs, attack="cascade")
    rows = list(csv.DictReader(io.StringIO(result.to_csv())))
    body = json.loads(result.to_json())
    assert len(rows) == len(body["rows"]) == 2
    for row, line, table in zip(result.rows, rows, body["rows"], strict=True):
        for name, score in row.scores.items():
            assert float(line[name]) == score.accuracy == table["scores"][name]["accuracy"]
            assert (float(line[f"{name}_low"]), float(line[f"{name}_high"])) == score.interval
            assert tuple(table["scores"][name]["interval"]) == score.interval
        assert (float(line["seconds"]), line["peak_memory_mb"], int(line["best_epoch"])) == (4.0, "", 2)
        assert (table["robust_gap"], table["method"]) == (0.25, "at")
    about, _, header, rule, first, second, _, note = result.to_markdown().rstrip("\n").split("\n")
    assert "40 test inputs of two-moons at linf:0.04" in about
    assert header.count("|") == rule.count("|") == first.count("|") == second.count("|") == 11
    assert f"| {100 * result.rows[0].scores['pgd'].accuracy:.1f} % (" in first
    assert "| 4.0 s | 450 |  | 2/3 | 25.0 |" in first
    assert "highest minus last" in note
    assert "cascade" in header
    assert "cascade" not in quick(runs).to_markdown()


def test_a_notebook_a_frame_and_a_paper_get_the_same_numbers(runs):
    result = quick(runs)
    clean, attacked = (f"{100 * result.rows[1].scores[key].accuracy:.1f}" for key in ("clean", "pgd"))
    first, *rows = repr(result).splitlines()
    assert first == f"Comparison: {result.heading}"
    assert [row.split()[0] for row in rows] == ["first", "second"]
    assert rows[1] == f"  second  clean {clean} %, PGD-40 {attacked} %"
    assert str(result.plot()) == result.to_svg()
    page = result._repr_html_()
    assert page.startswith("<img ")
    assert f"<td>{clean} % (" in page
    latex = result.to_latex()
    assert rf"second & at & {clean} \% (" in latex
    assert latex.count(r"\\") == 3
    frame = result.to_pandas()
    table = list(csv.DictReader(io.StringIO(result.to_csv())))
    assert list(frame.columns) == list(table[0])
    assert [str(value) for value in frame["pgd_low"]] == [row["pgd_low"] for row in table]


def test_the_plot_is_sound_and_speaks(tmp_path):
    strange = write_run(tmp_path / 'a<b>&"|[red] with a name that is far too long')
    result = quick([strange, write_run(tmp_path / "plain", 0.05)])
    root = ElementTree.fromstring(result.to_svg())
    space = {"s": "http://www.w3.org/2000/svg"}
    title, summary = (root.find(f"s:{name}", space) for name in ("title", "desc"))
    assert root.get("aria-labelledby") == f"{title.get('id')} {summary.get('id')}"
    assert "two-moons at linf:0.04" in title.text
    groups = root.findall("s:g", space)
    scores = [(row, name, score) for row in result.rows for name, score in row.scores.items()]
    assert len(groups) == len(scores) == 4
    for group, (row, _, score) in zip(groups, scores, strict=True):
        assert group.find("s:title", space).text.startswith(row.name)
        assert f"{score.right} of 40" in group.find("s:title", space).text
        # 490 pixels from 0 to 100 %, from 196 on.
        assert float(group.find("s:rect", space).get("width")) == pytest.approx(490 * score.accuracy, abs=0.1)
        line = group.findall("s:line", space)[1]
        ends = [196 + 490 * end for end in score.interval]
        assert [float(line.get(key)) for key in ("x1", "x2")] == pytest.approx(ends, abs=0.1)
        assert row.name in summary.text
    assert r'a\<b\>\&"\|\[red\]' in result.to_markdown()


def test_names_tell_runs_apart_and_can_be_shown(tmp_path):
    folders = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", 0.1)]
    folders.append(shutil.copytree(folders[0], tmp_path / "c\n\x07d"))
    rows = quick(folders, inputs=5).rows
    assert [row.name for row in rows] == [str(folders[0]), str(folders[1]), "c??d"]
    assert rows[0].key == rows[2].key != rows[1].key


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ({"data": "mnist-mini"}, {}, r"different data \(first: two-moons, other: mnist-mini\).*--data NAME"),
        ({"threat": None}, {}, "the run 'other' has no threat.*--threat"),
        ({"threat": "l2:0.1"}, {}, r"different threats \(first: linf:0.04, other: l2:0.1\).*--threat"),
        ({"threat": "linff:0.1"}, {}, "Did you mean 'linf'"),
        ({"classes": 3}, {}, "the run 'other' has 3 classes, the data 'two-moons' have 2"),
        ({}, {"data": "mnist-mini"}, "the run 'first' does not fit the data 'mnist-mini'"),
        ({}, {"data": "two-mons"}, "Did you mean 'two-moons'"),
        ({}, {"threat": "linf:0"}, "allows no change"),
        ({}, {"threat": "linff:1"}, "Did you mean 'linf'"),
        ({}, {"attack": "fgsm"}, "unknown attack 'fgsm' to compare by.*autoattack, cascade, none"),
        ({}, {"inputs": 0}, "inputs must be at least 1, got 0"),
    ],
)
def test_runs_that_cannot_be_judged_alike_are_refused(tmp_path, recipe, options, message):
    folders = [write_run(tmp_path / "first"), write_run(tmp_path / "other", **recipe)]
    with pytest.raises(hf.InputError, match=message):
        quick(folders, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_patches_have_no_pgd(runs):
    with pytest.raises(hf.UnsupportedError, match="'pgd' does not handle the threat 'patch:2x2'"):
        quick(runs, threat=hf.Patch(2, 2))


def test_data_and_threat_that_are_given_settle_the_matter(tmp_path):
    first, other = (
        write_run(tmp_path / "first", data="mnist-mini"),
        write_run(tmp_path / "other", threat=None, classes=3),
    )
    result = quick([first, other], data="two-moons", threat=hf.L2(0.01), inputs=3000)
    assert (result.data, result.threat, result.inputs) == ("two-moons", "l2:0.01", 1000)
    data = hf.load_data("two-moons")
    mine = Dataset("mine", data.train, data.test[:7], data.classes)
    assert (quick([first], data=mine).data, quick([first], data=mine).inputs) == ("mine", 7)


def test_data_that_the_recipe_cannot_name(tmp_path):
    with pytest.raises(hf.InputError, match="the data of the runs cannot be loaded; name them: --data NAME"):
        quick([write_run(tmp_path / "toy", data="toy")])
    assert quick([write_run(tmp_path / "old", data=None)], inputs=2).data == "two-moons"  # run.json says so
    nameless = write_run(tmp_path / "nameless", data=None)
    write_json(nameless / files.RUN, {})
    with pytest.raises(hf.InputError, match="does not say what it was trained on"):
        quick([nameless])


def test_unfinished_and_missing_runs_are_refused(tmp_path, runs):
    with pytest.raises(hf.InputError, match="at least one folder"):
        quick([])
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere", runs[0] / "model.safetensors"):
        with pytest.raises(hf.InputError, match="there is no training run in"):
            quick([folder])
    with pytest.raises(hf.InputError, match="is given twice"):
        quick([runs[0], runs[1], runs[0] / ".." / "first"])
    longer = write_run(tmp_path / "longer", epochs=5)
    with pytest.raises(hf.InputError, match=r"at epoch 3 of 5. Finish it: holdfast train .*longer --resume"):
        quick([longer])
    patient = write_run(tmp_path / "patient", epochs=5, evaluate={"patience": 1})
    assert quick([patient], inputs=1).rows[0].epochs == 3
    (runs[1] / files.MODEL).unlink()
    with pytest.raises(hf.InputError, match=r"not finished: 'model.safetensors' is missing. Finish it: .* --resume"):
        quick(runs)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("recipe.toml", "epochs = ", r"recipe.toml'.*train the run again"),
        ("run.json", "{", r"run.json'"),
        ("run.json", "[]", "expected a table, got list"),
        ("run.json", None, r"run.json'.*No such file"),
        ("history.csv", None, r"history.csv'.*No such file"),
        ("history.csv", "", "it has no epochs"),
        ("history.csv", "epoch,loss\n1,2\n", "line 2: KeyError: 'seconds'"),
        ("history.csv", "epoch,seconds\n1,fast\n", "line 2: ValueError: .*'fast'"),
        ("history.csv", "epoch,seconds,x\n1,2,3\n2,5\n", "line 3 has too few"),
        ("history.csv", "epoch,seconds\n1,2,3\n", "line 2 has too few, too many"),
        ("history.csv", "epoch,seconds\n1,nan\n", "infinite values"),
        ("history.csv", "epoch,seconds\n1,\n", "line 2: ValueError"),
        ("history.csv", "epoch,seconds\n\xff", r"history.csv'"),
        ("model.safetensors", "rubbish", r"model.safetensors' is damaged"),
    ],
)
def test_damaged_files_are_named(runs, name, text, message):
    path = runs[1] / name
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(hf.StorageError, match=message):
        quick(runs)


def test_a_model_without_its_architecture_is_refused(runs):
    hf.save_model(torch.nn.Linear(2, 2), runs[1] / files.MODEL)
    with pytest.raises(hf.InputError, match="the run 'second' cannot be compared: only models that make_model built"):
        quick(runs)


def test_a_full_disk_or_a_file_in_the_way_is_a_clear_error(runs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results").write_text("")
    with pytest.raises(hf.StorageError, match="cannot write"):
        quick(runs, out=tmp_path / "out")


def test_best_epoch_of_a_run_whose_recipe_cannot_be_read_again(tmp_path):
    run = Run(tmp_path, "run", {}, None, tuple(HISTORY), "")
    assert best_epoch(run) == 2
    clean = tuple({key: value for key, value in row.items() if key != "validation_robust"} for row in HISTORY)
    assert best_epoch(replace(run, history=clean)) == 3
