"""`holdfast radius` and `holdfast nearest`: the two ends of the robust radius of each input."""

import csv
import json
import math

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.data.draw import sample


def true_radii(path, taken):
    """Distance of each input to the nearest decision boundary of a linear classifier, 0 if it is misclassified."""
    layer = next(m for m in hf.load_model(path).modules() if isinstance(m, nn.Linear))
    w, z = layer.weight.detach().double(), layer(taken.x.flatten(1)).double()
    gap = z.gather(1, taken.y[:, None]) - z
    size = (w[taken.y][:, None] - w[None]).norm(dim=2)
    return (gap / size).scatter(1, taken.y[:, None], math.inf).amin(1).clamp(min=0).detach()


def test_radius_writes_a_radius_of_each_drawn_input_that_is_proved_and_nearly_the_true_one(command, means, tmp_path):
    shown = command("radius", means, "--norm", "l2", "-n", 12, "--method", "fastlin", "--out", "r.csv", "--quiet")
    taken = sample("mnist-mini", 12)
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["input"]) for row in rows] == taken.index.tolist()
    assert [int(row["label"]) for row in rows] == taken.y.tolist()
    found, true = torch.tensor([float(row["radius"]) for row in rows]).double(), true_radii(means, taken)
    assert bool((found <= true + 1e-9).all())
    assert torch.allclose(found, true, atol=0.03)  # the rounding-error term takes 0.02
    assert f"proved for {int((true > 0).sum())} of 12 inputs by 'fastlin'" in shown
    assert "12 of 2,000, drawn by seed 0" in shown
    ordered = found.sort().values
    words = " ".join(shown.split())
    for name, i in (("smallest", 0), ("lower quarter", 2), ("median", 5), ("upper quarter", 8), ("largest", 11)):
        assert f"{name} {float(ordered[i]):.4g}" in words


def test_radius_by_smoothing_takes_samples_and_sigma(command, means, tmp_path):
    how = ["--norm", "l2", "--method", "smoothing", "--sigma", 0.25, "--samples", 200, "--alpha", 0.01]
    command("radius", means, *how, "-n", 4, "--out", "r.json", "--seed", 3)
    taken = sample("mnist-mini", 4, seed=3)
    options = {"sigma": 0.25, "n": 200, "alpha": 0.01, "seed": 3}
    direct = hf.radius(hf.load_model(means), taken.x, taken.y, "l2", "smoothing", **options)
    assert [row["radius"] for row in json.loads((tmp_path / "r.json").read_text())] == direct.tolist()
    with pytest.raises(hf.InputError, match="'smoothing' needs --sigma"):
        command("radius", means, "--norm", "l2", "--method", "smoothing")


def test_radius_refuses_what_it_cannot_do_before_it_begins(command, means):
    with pytest.raises(hf.InputError, match=r"unknown method 'pac' for a radius. Did you mean 'pec'"):
        command("radius", means, "--method", "pac")
    with pytest.raises(hf.InputError, match="unknown norm 'l3' for a radius"):
        command("radius", means, "--norm", "l3", "-n", 1)
    with pytest.raises(hf.InputError, match=r"--out must end in .csv or .json, got 'r.txt'"):
        command("radius", means, "--out", "r.txt")
    with pytest.raises(hf.StorageError, match="there is no folder 'no'"):
        command("radius", means, "--out", "no/r.csv")


def test_nearest_is_the_attack_for_the_nearest_example(command, means, tmp_path):
    shown = command("nearest", means, "--norm", "l2", "--method", "fmn", "-n", 5)
    assert "median l2 distance" in shown
    assert "results: runs/nearest-means-l2-fmn/results.csv" in shown
    command("attack", means, "--minimum", "--norm", "l2", "--method", "fmn", "--n", 5, "--out", "same")
    one, two = ((tmp_path / f / "results.csv").read_text() for f in ("runs/nearest-means-l2-fmn", "same"))

    def without_time(text):
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(text.splitlines())]

    assert without_time(one) == without_time(two)
    with pytest.raises(hf.InputError, match="--resume"):
        command("nearest", means, "--norm", "l2", "--method", "fmn", "-n", 5)
