"""`holdfast analyze` and `holdfast explain trust`: the numbers of the Python functions, on the screen and in files."""

import csv
import json

import pytest
import torch

import holdfast as hf
from holdfast.analyze.concentration import concentration
from holdfast.analyze.difficulty import difficulty, group_means
from holdfast.analyze.pac_bayes import pac_bayes_of
from holdfast.analyze.subsets import steepest_margin
from holdfast.analyze.tightness import tightness
from holdfast.data.draw import sample
from holdfast.explanations.evaluate.trust import TRUST, infd, trust_scores
from holdfast.training import parse_override
from holdfast.training.folder import read_losses
from holdfast.training.logs import read_examples


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished tiny trainings that differ in their seed."""
    folder = tmp_path_factory.mktemp("runs")
    tiny = ["epochs=2", "validation=0.97", "evaluate.count=20", "evaluate.attack_steps=2", "threat=linf:0.05"]
    for seed in (0, 1):
        logs = f"log.losses={str(seed == 0).lower()}"
        overrides = dict(parse_override(text) for text in [*tiny, logs, f"seed={seed}"])
        hf.train("mnist-mini-standard", out=folder / str(seed), progress=False, **overrides)
    return folder


def rows_of(path):
    return json.loads(path.read_text())


def test_pac_bayes_shows_the_terms_and_the_gap(command, means, tmp_path):
    shown = command("analyze", "pac-bayes", means, "--threat", "linf:0.05", "-n", 40, "--steps", 3, "--out", "p.json")
    taken = sample("mnist-mini", 40, split="train")
    direct = pac_bayes_of(hf.load_model(means), taken.x, taken.y, hf.Linf(0.05), steps=3)
    found = {row["figure"]: row["value"] for row in rows_of(tmp_path / "p.json")}
    assert found["objective"] == pytest.approx(direct.value)
    assert found["gap"] == pytest.approx(found["accuracy on training data"] - found["accuracy on test data"])
    assert "the objective is no bound of the error" in shown


def test_lipschitz_brackets_the_constant_of_a_linear_model(command, means, tmp_path):
    command("analyze", "lipschitz", means, "-n", 4, "--steps", 5, "--threat", "l2:0.5", "--out", "l.json")
    rows = rows_of(tmp_path / "l.json")
    weight = next(p for name, p in hf.load_model(means).named_parameters() if "weight" in name).detach().double()
    true = float(torch.cdist(weight, weight).max())
    upper = next(row["value"] for row in rows if row["constant"].startswith("margin of"))
    lower = next(row["value"] for row in rows if row["constant"] == "some margin, at least")
    assert lower <= true * (1 + 1e-9)
    assert true <= upper <= 1.02 * true
    assert rows[-1]["value"] == pytest.approx(lower / upper)
    with pytest.raises(hf.InputError, match="--threat must be an l2 ball"):
        command("analyze", "lipschitz", means, "--threat", "linf:0.1")


def test_tightness_has_a_row_for_each_relaxation_and_measure(command, means, tmp_path):
    shown = command("analyze", "tightness", means, "--threat", "linf:0.02", "-n", 6, "--out", "t.csv")
    taken = sample("mnist-mini", 6)
    direct = tightness(hf.load_model(means), taken.x, taken.y, hf.Linf(0.02))
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = {(row["relaxation"], row["measure"]): float(row["mean"]) for row in csv.DictReader(file)}
    assert rows == {
        (name, measure): pytest.approx(float(getattr(one, measure).double().mean()))
        for name, one in direct.items()
        for measure in ("total", "loss")
    }
    assert "lower is tighter" in shown
    with pytest.raises(hf.UnsupportedError, match="tightness compares bounds over one region"):
        command("analyze", "tightness", means, "--threat", "patch:3x3")


def test_cost_counts_the_products_of_a_linear_model(command, means, tmp_path):
    shown = command("analyze", "cost", means, "--threat", "linf:0.02", "-n", 3, "--out", "c.csv")
    with (tmp_path / "c.csv").open(newline="") as file:
        rows = {row["method"]: int(row["multiplications"]) for row in csv.DictReader(file)}
    assert rows["forward"] == 784 * 10
    assert rows["pgd step"] == 2 * 784 * 10
    assert "counted as they are run" in shown


def test_difficulty_ranks_the_training_inputs_of_a_run(command, runs, tmp_path):
    shown = command("analyze", "difficulty", runs / "0", "--against", runs / "1", "--groups", 4, "--out", "d.csv")
    ranks = difficulty(read_examples(runs / "0"))
    torch.testing.assert_close(read_examples(runs / "0").mean(0), read_losses(runs / "0"), rtol=1e-5, atol=1e-6)
    with (tmp_path / "d.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["difficulty"]) for row in rows] == ranks.tolist()
    assert f"hardest: {ranks.argsort()[:10].tolist()}" in shown
    sizes = [int(line.split()[3]) for line in shown.splitlines() if line.startswith("0") and " to " in line]
    assert sum(sizes) == len(ranks)
    assert "1/3 is chance" in shown
    same = command("analyze", "difficulty", runs / "0", "--against", runs / "0")
    assert "0.000 (0 is the same ranking" in same
    with pytest.raises(hf.StorageError, match="there is no checkpoint"):
        command("analyze", "difficulty", tmp_path)


def test_difficulty_shows_images_and_groups_through_the_epochs(command, runs, tmp_path):
    how = ["--skip", 1, "--zero-one", "--images", 3, "--folder", tmp_path / "d", "--out", "d.csv"]
    command("analyze", "difficulty", runs / "0", *how)
    page = (tmp_path / "d" / "difficulty.html").read_text()
    assert page.count("<img") == 6
    assert page.index("Hardest") < page.index("Easiest")
    ranks = difficulty(read_examples(runs / "0", "error")[1])
    assert page.index(f"input {int(ranks.argsort(stable=True)[0])}<") < page.index("Easiest")
    with (tmp_path / "d" / "groups.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = group_means(read_examples(runs / "0"), ranks)
    assert float(rows[1]["loss under attack, group 0"]) == pytest.approx(float(expected[1, 0]), nan_ok=True)
    assert "norm of the features, group 9" in rows[0]
    assert "validation error under attack" in (tmp_path / "d" / "groups.svg").read_text()
    with pytest.raises(hf.InputError, match=r"no log of its losses. Write one: \[log\] losses = true"):
        command("analyze", "difficulty", runs / "1", "--skip", 1)


def test_subsets_are_compared_with_a_bound_of_their_steepness(command, runs, tmp_path):
    shown = command("analyze", "subsets", runs / "0", runs / "1", "--out", "s.json")
    rows = rows_of(tmp_path / "s.json")
    model = hf.load_model(runs / "0" / "model.safetensors")
    assert rows[0]["lipschitz"] == pytest.approx(steepest_margin(model, (1, 28, 28)))
    assert rows[0]["overfitted"] == pytest.approx(rows[0]["best"] - rows[0]["last"])
    assert rows[0]["subset"] == "all"
    assert "lipschitz" in shown


def test_trust_scores_each_method(command, means, tmp_path):
    how = ["-n", 4, "--samples", 2, "--method", "saliency", "--method", "integrated-gradients"]
    shown = command("explain", "trust", means, *how, "--out", "t.json")
    rows = rows_of(tmp_path / "t.json")
    assert len(rows) == 8
    assert all(row["completeness"] is None for row in rows if row["method"] == "saliency")
    assert all(row["sensitivity"] == 0 for row in rows if row["method"] == "saliency")  # the model is linear
    assert all(row["completeness"] < 1e-4 for row in rows if row["method"] == "integrated-gradients")
    assert all(word in shown for word in TRUST)


def test_trust_scores_agree_with_the_single_measures(means):
    model, taken = hf.load_model(means), sample("mnist-mini", 3)
    found = trust_scores(model, taken.x, taken.y, "saliency", samples=3, seed=5)
    slope = hf.explain(model, taken.x, taken.y, "saliency", seed=5).slope
    assert tuple(found) == TRUST
    assert torch.equal(found["infidelity"], infd(model, taken.x, taken.y, slope, samples=3, seed=5))


def test_pictures_of_n_inputs_are_of_different_classes(command, means, tmp_path):
    command("explain", means, "-n", 3, "--method", "saliency", "--out", "pics")
    with (tmp_path / "pics" / "explanations.csv").open(newline="") as file:
        found = [int(row["input"]) for row in csv.DictReader(file)]
    labels = hf.load_data("mnist-mini").test.y[found].tolist()
    assert len(set(labels)) == len(found) == 3


def test_volume_compares_optimisers_at_equal_loss(command, tmp_path):
    how = ["--architecture", "mlp", "--arch-args", "hidden=[8]", "--samples", 4, "--splits", 2, "--divisor", 1]
    words = ["--bins", "0.4:0.7:0.15", "--optimiser", "guess-and-check", "--optimiser", "linear", "--limit", 1024]
    shown = command("analyze", "volume", *how, *words, "--out", "v", "--quiet")
    cells = json.loads((tmp_path / "v" / "volume.json").read_text())["cells"]
    assert len(cells) == 4
    assert "guess-and-check" in shown
    assert "(0.4, 0.55]" in shown
    reached = [row["accuracy"] for rows in cells.values() for row in rows if row["accuracy"] is not None]
    assert reached
    assert "width None" not in shown
    with pytest.raises(hf.InputError, match="no optimiser found a network in any bin"):
        command(
            "analyze", "volume", *how, "--bins", "0.0:0.001:0.001", "--optimiser", "guess-and-check", "--limit", 256
        )
    with pytest.raises(hf.InputError, match="cannot read --bins"):
        command("analyze", "volume", "--bins", "0.4")


def test_volume_of_the_toys(command, tmp_path):
    shown = command("analyze", "volume", "--toy", "slab", "--limit", 8192, "--out", "toys", "--quiet")
    assert "robust" in shown
    assert "0 hits in 8,192 guesses" in shown
    assert (tmp_path / "toys" / "slab.svg").read_text().startswith("<svg")
    assert [row["boundary"] for row in rows_of(tmp_path / "toys" / "slab.json")] == ["fits", "linear", "robust"]
    with pytest.raises(hf.InputError, match="Did you mean 'wedge'"):
        command("analyze", "volume", "--toy", "wegde")


def test_draws_of_a_random_network_and_their_pictures(command, means, tmp_path):
    model = hf.make_model("rse", of="linear", first=0.4, seed=0)
    hf.save_model(model, tmp_path / "random.safetensors")
    few = ["-n", 4, "--gradients", 3, "--sources", 2, "--samples", "1,2", "--threat", "linf:0.1"]
    shown = command("analyze", "draws", "random.safetensors", *few, "--out", "d.json", "--pictures", "pictures")
    taken = sample("mnist-mini", 4)
    direct = concentration(hf.load_model(tmp_path / "random.safetensors"), taken.x, taken.y, draws=3)
    found = {row["figure"]: row["value"] for row in rows_of(tmp_path / "d.json")}
    assert found["mean cosine of two draws"] == pytest.approx(float(direct.r_mean.mean()), abs=1e-5)
    assert "accuracy under eot-pgd, 2 draws" in found
    assert "eot-grid" in shown
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"transfer.svg", "cosines.svg", "accuracy.svg", "kappa.svg"}
    with pytest.raises(hf.InputError, match="no random network"):
        command("analyze", "draws", means, "-n", 2)
    with pytest.raises(hf.InputError, match="--samples must be numbers"):
        command("analyze", "draws", "random.safetensors", "--samples", "1,x")


def test_proxy_shows_the_rise_at_each_angle(command, means, tmp_path):
    command("analyze", "proxy", means, "-n", 4, "--steps", 2, "--out", "p.json", "--picture", "p.svg")
    rows = rows_of(tmp_path / "p.json")
    assert [row["degrees"] for row in rows] == list(range(0, 91, 10))
    assert rows[0]["relative rise"] == 1
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
