"""The comparison over training sets: what it draws, what it stores, how it goes on, and the command."""

import json

import pytest
import torch

import holdfast as hf
from holdfast.analyze.volume.few_samples import few_samples
from holdfast.analyze.volume.study import FILE, architecture_of, study, summary
from holdfast.data import Dataset, Split
from holdfast.utils.clock import now, timed_by, until

BINS = [(0.0, 0.6), (0.6, 0.7)]


@pytest.fixture(scope="module")
def stripes():
    """Images of 4 x 5 pixels in three classes that the brightest column tells."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 3
    x = 0.2 * torch.rand(240, 1, 4, 5, generator=generator)
    x[torch.arange(240), 0, :, y + 1] += 0.7
    return Dataset("stripes", Split(x[:120], y[:120]), Split(x[120:], y[120:]), ("a", "b", "c"))


def run(data, bins=BINS, **options):
    make = architecture_of("mlp", data, {"hidden": (6,)})
    how = {"widths": (None,), "samples": (4,), "splits": 2, "divisor": 1.0, "limit": 4000, **options}
    return study(data, make, bins, **how)


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


def test_a_cell_that_the_deadline_cut_short_is_made_anew(stripes, tmp_path):
    """By a clock that counts how often it is asked: the time is over in the middle of the first search."""
    how = {"bins": [(-1.0, 0.0), *BINS], "optimisers": ("guess-and-check",), "splits": 1}  # no loss is negative
    whole = run(stripes, **how)
    ticks = iter(range(10**9))
    with timed_by(lambda: float(next(ticks))), until(now() + 4):
        short = run(stripes, out=tmp_path, **how)
    assert whole[0]["tried"] == 4096
    assert 0 < short[0]["tried"] < whole[0]["tried"]
    assert not (tmp_path / FILE).exists()
    again = run(stripes, out=tmp_path, **how)
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]


def test_a_deadline_before_the_first_guess_leaves_empty_rows(stripes, tmp_path):
    ticks = iter(range(10**9))
    with timed_by(lambda: float(next(ticks))), until(now() + 2):  # the study may look once, the search may not
        rows = run(stripes, out=tmp_path, optimisers=("guess-and-check",))
    assert [(row["tried"], row["accuracy"]) for row in rows] == [(0, None)] * 2


OWN = """
from torch import nn
class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.first, self.last = nn.Linear(20, width), nn.Linear(width, 2)
    def forward(self, x):
        return self.last(self.first(x.flatten(1)).relu())
"""


def test_a_module_of_ones_own_in_a_file_is_a_family(stripes, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    make = architecture_of(f"{tmp_path / 'own.py'}:Net", stripes)
    how = {"samples": (2,), "splits": 1, "optimisers": ("guess-and-check",), "divisor": 1.0, "limit": 2000}
    rows = study(stripes, make, BINS, widths=(None, 5), **how)
    assert [row["width"] for row in rows] == [None, None, 5, 5]
    assert any(row["accuracy"] is not None for row in rows)
    assert make(5)(stripes.test.x[:2]).shape == (2, 2)


def test_another_architecture_of_the_same_size_is_another_study(stripes, tmp_path):
    def asked(**options):
        make = architecture_of("mlp", stripes, {"hidden": (6,), **options})
        how = {"samples": (2,), "splits": 1, "optimisers": ("guess-and-check",), "divisor": None, "limit": 256}
        return study(stripes, make, BINS, widths=(None,), out=tmp_path, **how)

    first = asked()
    with pytest.raises(hf.InputError, match="architecture: was"):
        asked(activation="tanh")
    stored = json.loads((tmp_path / FILE).read_text())
    del stored["settings"]["architecture"]  # as folders were before
    (tmp_path / FILE).write_text(json.dumps(stored))
    assert [row["loss"] for row in asked()] == [row["loss"] for row in first]


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
