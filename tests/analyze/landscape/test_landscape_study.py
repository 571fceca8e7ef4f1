"""The files of a study, and going on with it."""

import csv

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.analyze.landscape.attacked import Adversary
from holdfast.analyze.landscape.landscape_study import Extent, study
from holdfast.errors import InputError, StorageError

EXTENT = Extent(k=2, span=0.5, cells=3)


@pytest.fixture
def task(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    return model, torch.rand(8, 1, 2, 3), torch.randint(2, (8,)), Adversary(hf.Linf(0.1), steps=2), tmp_path / "out"


def rows(path):
    with path.open(newline="") as file:
        return [list(map(float, row)) for row in list(csv.reader(file))[1:]]


def test_the_middle_of_every_picture_is_the_model_itself(task):
    model, x, y, adversary, folder = task
    study(*task, extent=EXTENT)
    loss = adversary.loss(model, x, y)
    grid = {(a, b): value for a, b, value in rows(folder / "surface.csv")}
    assert len(grid) == 9
    assert grid[0.0, 0.0] == pytest.approx(loss, rel=1e-5)
    assert dict(rows(folder / "filters.csv"))[0.0] == pytest.approx(loss, rel=1e-5)
    assert rows(folder / "similarity.csv")[0][1:] == pytest.approx([1, 1])
    assert len(rows(folder / "eigenvalues.csv")) == 2
    assert {p.name for p in folder.glob("*.svg")} == {"surface.svg", "filters.svg", "similarity.svg"}


def test_a_study_that_was_stopped_goes_on_with_the_lines_it_has(task):
    folder = task[-1]
    study(*task, extent=EXTENT)
    whole = (folder / "surface.csv").read_text()
    lines = whole.splitlines()
    (folder / "surface.csv").write_text("\n".join(lines[:6]) + "\n")  # one line of the grid and a part of the next
    (folder / "similarity.csv").unlink()
    seen = []
    study(*task, extent=EXTENT, watch=seen.append)
    assert (folder / "surface.csv").read_text() == whole
    assert [text for text in seen if "line" in text] == ["surface: line 2 of 3", "surface: line 3 of 3"]
    assert not any("eigenvalues" in text for text in seen)


def test_other_settings_and_damaged_files_are_refused(task):
    folder = task[-1]
    study(*task, extent=EXTENT)
    with pytest.raises(InputError, match="another run"):
        study(*task, extent=Extent(k=2, span=0.7, cells=3))
    (folder / "spectrum.npz").write_bytes(b"nothing")
    with pytest.raises(StorageError, match="delete the file"):
        study(*task, extent=EXTENT)
