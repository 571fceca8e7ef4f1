"""A run of certificates that is killed goes on where it stopped, and mixes nothing."""

import json
from importlib import import_module

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import StorageError
from holdfast.runs.certify_run import certify_run
from holdfast.runs.radius_run import radius_run

module = import_module("holdfast.runs.certify_run")
THREAT = hf.Linf(0.1)


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    model[0].weight.data.mul_(3.0)
    x = torch.rand(20, 6)
    y = model(x).argmax(1)
    y[3] = (y[3] + 1) % 3
    return model, x, y


def killed(monkeypatch, after):
    """Lets the process die in the call of the certificate that comes after so many."""
    calls, real = [], module.certify

    def certify(model, x, *rest, **options):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(len(x))
        return real(model, x, *rest, **options)

    monkeypatch.setattr(module, "certify", certify)
    return calls


def test_what_is_done_is_not_done_again(task, tmp_path, monkeypatch):
    whole = certify_run(*task, THREAT, "beta-crown")
    kept = tmp_path / "rows.json"
    with monkeypatch.context() as patch:
        assert killed(patch, 1) == []
        with pytest.raises(KeyboardInterrupt):
            certify_run(*task, THREAT, "beta-crown", rows_file=kept)
    assert len(json.loads(kept.read_text())["rows"]) == 8, "a few inputs at a time"
    with monkeypatch.context() as patch:
        calls = killed(patch, 99)
        rows = certify_run(*task, THREAT, "beta-crown", rows_file=kept, resume=True)
    assert sum(calls) == 12
    assert rows == whole
    assert [row["broken"] for row in rows] == [not row["certified"] for row in rows], "all are decided"
    assert rows[3]["broken"]


def test_rows_of_another_run_are_refused(task, tmp_path):
    model, x, y = task
    kept = tmp_path / "rows.json"
    certify_run(model, x, y, THREAT, "crown", rows_file=kept)
    with pytest.raises(hf.InputError, match="holds the rows of an earlier run: --resume goes on"):
        certify_run(model, x, y, THREAT, "crown", rows_file=kept)
    for other in (
        (model, x, y, hf.Linf(0.2), "crown"),
        (model, x, y, THREAT, "ibp"),
        (model, x / 2, y, THREAT, "crown"),
    ):
        with pytest.raises(hf.InputError, match="holds the results of another run"):
            certify_run(*other, rows_file=kept, resume=True)
    kept.write_text(kept.read_text()[:-9])
    with pytest.raises(StorageError, match="delete it to start again"):
        certify_run(model, x, y, THREAT, "crown", rows_file=kept, resume=True)
    with pytest.raises(hf.InputError, match="--resume needs --out"):
        certify_run(model, x, y, THREAT, "crown", resume=True)


def test_rows_of_an_exact_radius_tell_both_sides(task):
    model, x, y = (*task[:1], task[1][2:5], task[2][2:5])
    how = {"index": torch.arange(3), "options": {"tolerance": 1e-2}}
    rows = radius_run(model, x, y, "linf", "beta-crown", **how)
    assert (rows[1]["radius"], rows[1]["broken"], rows[1]["exact"]) == (0.0, 0.0, True)
    for row in rows:
        assert row["exact"] == (row["broken"] - row["radius"] <= 1e-2)
        assert row["radius"] <= row["broken"]
    assert any(row["exact"] and row["radius"] > 0 for row in rows)
    assert [set(row) for row in radius_run(model, x, y, "linf", "crown", **how)] == [{"input", "label", "radius"}] * 3
