"""The comparison over training sets: what it draws, what it stores, how it goes on, and the command."""

import json

import pytest
import torch

import holdfast as hf
from holdfast.analyze.volume.few_samples import few_samples
from holdfast.analyze.volume.study import FILE, architecture_of, study, summary
from holdfast.data import Dataset, Split
from holdfast.utils.clock import now, until

BINS = [(0.0, 0.6), (0.6, 0.7)]


@pytest.fixture(scope="module")
def stripes():
    """Images of 4 x 5 pixels in three classes that the brightest column tells."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 3
    x = 0.2 * torch.rand(240, 1, 4, 5, generator=generator)
    x[torch.arange(240), 0, :, y + 1] += 0.7
    return Dataset("stripes", Split(x[:120], y[:120]), Split(x[120:], y[120:]), ("a", "b", "c"))


def run(data, **options):
    make = architecture_of("mlp", data, {"hidden": (6,)})
    how = {"widths": (None,), "samples": (4,), "splits": 2, "divisor": 1.0, "limit": 4000, **options}
    return study(data, make, BINS, **how)


def test_few_samples_are_balanced_and_standardised(stripes):
    task = few_samples(stripes, 6, classes=2, seed=3)
    assert torch.bincount(task.train.y).tolist() == [3, 3]
    assert len(task.test) == 80
    raw = task.train.x * stripes.train.x.std() + stripes.train.x.mean()
    for image, label in zip(raw, task.train.y.tolist(), strict=True):
        assert int(image[0].sum(0).argmax()) - 1 == task.classes[label]
    pairs = {few_samples(stripes, 2, seed=s).classes for s in range(40)}
    assert len(pairs) == 6  # every pair, in both orders
    with pytest.raises(hf.InputError, match="shared by 2 classes equally"):
        few_samples(stripes, 3)
    with pytest.raises(hf.InputError, match="expected 2 to 3 of them, got 4"):
        few_samples(stripes, 4, classes=4)
    with pytest.raises(hf.InputError, match="has 40 samples, fewer than 50"):
        few_samples(stripes, 100)


def test_a_row_for_each_cell_and_a_mean_over_the_splits(stripes):
    rows = run(stripes, optimisers=("guess-and-check", "sgd", "linear", "pattern-search"))
    assert len(rows) == 2 * 4 * len(BINS)
    for row in rows:
        if row["loss"] is not None:
            assert row["low"] < row["loss"] <= row["high"]
            assert 0 <= row["accuracy"] <= 1
    guessed = [row for row in rows if row["optimiser"] == "guess-and-check"]
    assert all(row["volume_low"] <= row["volume_high"] for row in guessed)
    table = {(r["optimiser"], r["low"]): r for r in summary(rows)}
    first = [r["accuracy"] for r in guessed if r["low"] == 0.0 and r["accuracy"] is not None]
    assert len(first) == 2
    assert table["guess-and-check", 0.0]["accuracy"] == pytest.approx(sum(first) / 2)
    assert table["guess-and-check", 0.0]["error"] == pytest.approx(abs(first[0] - first[1]) / 2)


def test_a_study_goes_on_where_it_stopped(stripes, tmp_path):
    whole = run(stripes, optimisers=("guess-and-check",))
    with until(now() - 1):
        assert run(stripes, optimisers=("guess-and-check",), out=tmp_path) == []
    run(stripes, optimisers=("guess-and-check",), splits=1, out=tmp_path)
    stored = json.loads((tmp_path / FILE).read_text())
    assert list(stored["cells"]) == ["None 4 0 guess-and-check"]
    stored["cells"]["None 4 0 guess-and-check"][0]["accuracy"] = 0.125  # would be lost if it ran anew
    (tmp_path / FILE).write_text(json.dumps(stored))
    again = run(stripes, optimisers=("guess-and-check",), out=tmp_path)
    assert again[0]["accuracy"] == 0.125
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]
    with pytest.raises(hf.InputError, match="limit: was 4000, is 50"):
        run(stripes, limit=50, out=tmp_path)
    with pytest.raises(hf.InputError, match=r"unknown optimiser 'sdg'\. Did you mean 'sgd'"):
        run(stripes, optimisers=("sdg",))
