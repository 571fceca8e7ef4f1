"""`holdfast certify --method smoothing`: options, the file of samples, going on after an interruption."""

import csv
import json
import re
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app, main
from holdfast.data.draw import sample
from holdfast.runs import certify_run as runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "linear.safetensors"
    network = hf.make_model("linear", input_shape=(1, 28, 28), classes=10, seed=0)
    data = hf.load_data("mnist-mini")
    with torch.no_grad():  # nearest mean of each class: a linear classifier that needs no training
        means = torch.stack([data.train.x[data.train.y == c].mean(0).flatten() for c in range(10)])
        layer = next(m for m in network.modules() if isinstance(m, nn.Linear))
        layer.weight.copy_(means)
        layer.bias.copy_(-means.square().sum(1) / 2)
    hf.save_model(network, path)
    return path


SMOOTHING = ["--threat", "l2:0.2", "--method", "smoothing", "--sigma", 0.25, "--alpha", 0.01, "--inputs", 8, "--n", 500]


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_smoothing_writes_rows_with_alpha_and_samples(model, tmp_path):
    text = run("certify", model, *SMOOTHING, "--out", tmp_path / "a.csv")
    assert "of 8 (" in text
    assert "wrong with probability 0.01 at most" in text
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert len(rows) == 8
    assert list(rows[0]) == ["input", "label", "certified", "margin", "radius", "by", "alpha", "samples"]
    assert any(row["certified"] == "True" for row in rows)
    assert all(0 <= int(row["samples"]) <= 500 for row in rows)
    data = sample("mnist-mini", 8)
    network = hf.load_model(model)
    direct = hf.certify(network, data.x, data.y, hf.L2(0.2), "smoothing", sigma=0.25, alpha=0.01, n=500)
    assert [row["certified"] == "True" for row in rows] == direct.certified.tolist()


def figures(text):
    """CRE and ACB as they are printed."""
    line = next(line for line in text.splitlines() if line.startswith("certified error"))
    found = re.fullmatch(r"certified error \(CRE\) (.+)%, mean certified radius \(ACB\) (\S+) of (\S+)", line)
    return float(found[1]) / 100, float(found[2]), float(found[3])


def test_certified_error_and_mean_radius_are_printed(model):
    """All or nothing: ACB = eps (1 - CRE). The envelope has the same error and a larger mean radius."""
    shared = ["--threat", "linf:0.05", "--n", 40]
    error, radius, eps = figures(run("certify", model, *shared, "--method", "fastlin"))
    assert 0 < error < 1
    assert eps == 0.05
    assert radius == pytest.approx(eps * (1 - error), abs=1e-4)
    other, larger, _ = figures(run("certify", model, *shared, "--method", "pec"))
    assert other == error
    assert larger > radius
    data = sample("mnist-mini", 40)
    direct = hf.certify(hf.load_model(model), data.x, data.y, hf.Linf(0.05), "pec").radius
    assert larger == pytest.approx(float(direct.mean()), abs=1e-4)


def test_patches_have_no_mean_radius(tmp_path):
    path = tmp_path / "small.safetensors"
    hf.save_model(hf.make_model("linear", input_shape=(1, 28, 28), classes=10, seed=0), path)
    assert "ACB" not in run("certify", path, "--threat", "patch:2x2", "--method", "patch", "--n", 2)


def test_an_interrupted_run_resumes_and_gives_the_same(model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "b.json"
    words = ["certify", model, *SMOOTHING, "--option", "batch=200", "--out", out]
    whole = tmp_path / "whole.json"
    run(*words[:-1], whole)
    honest, calls = runs.certify, 0

    def interrupted(*args, watch, **options):
        def stop(counts, left):
            nonlocal calls
            watch(counts, left)
            calls += 1
            if calls == 6:
                raise KeyboardInterrupt

        return honest(*args, watch=stop, **options)

    monkeypatch.setattr(runs, "certify", interrupted)
    monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    assert "Go on: same command with --resume" in capsys.readouterr().err
    assert not out.exists()
    assert (tmp_path / "b.json.counts.npz").exists()
    monkeypatch.setattr(runs, "certify", honest)
    run(*words, "--resume")
    assert json.loads(out.read_text()) == json.loads(whole.read_text())


def test_samples_of_another_run_are_not_mixed_in(model, tmp_path):
    out = tmp_path / "c.csv"
    run("certify", model, *SMOOTHING, "--out", out)
    with pytest.raises(hf.InputError, match="--resume goes on with them"):
        run("certify", model, *SMOOTHING, "--out", out)
    with pytest.raises(hf.InputError, match=r"n: was 500, is 600"):
        run("certify", model, *SMOOTHING[:-1], 600, "--out", out, "--resume")
    with pytest.raises(hf.InputError, match="of another data, or of other inputs"):
        run("certify", model, *SMOOTHING[:-4], "--inputs", 7, "--n", 500, "--out", out, "--resume")
    text = run("certify", model, "--threat", "l2:0.05", *SMOOTHING[2:], "--out", out, "--resume")
    assert "at l2:0.05" in text


def test_options_are_refused_where_they_mean_nothing(model, tmp_path):
    with pytest.raises(hf.InputError, match="method 'ibp' has no option 'sigma'"):
        run("certify", model, "--method", "ibp", "--sigma", 0.1)
    with pytest.raises(hf.InputError, match="--resume needs --out"):
        run("certify", model, *SMOOTHING, "--resume")
    with pytest.raises(hf.InputError, match=r"--samples 5 cannot prove .* the smallest --samples that can is"):
        run("certify", model, *SMOOTHING[:-1], 5)
    with pytest.raises(hf.InputError, match="needs --sigma"):
        run("certify", model, "--threat", "l2:0.2", "--method", "smoothing")
    with pytest.raises(hf.StorageError, match="nothing to resume"):
        run("certify", model, *SMOOTHING, "--out", tmp_path / "none.csv", "--resume")


def test_n_is_the_number_of_inputs_for_methods_that_do_not_sample(model):
    assert "of 3 (" in run("certify", model, "--threat", "linf:0.001", "--method", "ibp", "--n", 3)
