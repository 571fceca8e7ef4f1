"""Curves of training runs: read from the history, whatever else stands in the file."""

import pytest

from holdfast.serve.listing import list_runs, read_run
from holdfast.serve.run_curves import POINTS, read_curves
from serve.made_runs import HISTORY, fill, write


def test_a_history_gives_its_curves():
    found = {curve.name: curve for curve in read_curves(HISTORY.encode())}
    assert list(found) == [
        *("training", "validation, clean", "validation, under attack", "validation, certified", "training loss")
    ]
    assert found["training"].epochs == (1, 2, 3)
    assert found["validation, certified"].values == (0.0, 0.2, 0.25)
    assert [name for name, curve in found.items() if curve.loss] == ["training loss"]


def test_runs_of_training_carry_them_and_audits_do_not(tmp_path):
    runs = {run.name: run for run in list_runs(fill(tmp_path / "runs"))}
    assert len(runs["trained"].curves) == 5
    assert runs["trained"].to_dict()["curves"][0]["values"] == (0.5, 0.75, 0.9)
    assert runs["elsewhere"].curves == ()
    assert runs["first"].curves == ()


def test_a_long_history_is_thinned_and_keeps_its_ends():
    lines = [f"{epoch},{1 / epoch}" for epoch in range(1, 1002)]
    (curve,) = read_curves("\n".join(["epoch,train_loss", *lines]).encode())
    assert len(curve.epochs) <= POINTS + 1
    assert (curve.epochs[0], curve.epochs[-1]) == (1, 1001)
    assert curve.values[-1] == 1 / 1001


@pytest.mark.parametrize(
    "text",
    [
        "",
        "epoch\n1\n",
        "train_loss\n1.0\n",
        "epoch,train_loss\none,1\n",
        "epoch,train_loss\n1,nan\n2,inf\n",
        "epoch,train_accuracy\n1,7\n2,-1\n",
        "epoch,train_loss\n1\n",
        "\0\0",
    ],
)
def test_what_is_no_number_is_left_out(text):
    assert read_curves(text.encode()) == ()
    assert read_curves(b"\xff\xfe") == read_curves(None) == ()


def test_a_link_to_a_history_is_not_followed(tmp_path):
    write(tmp_path / "outside.csv", HISTORY)
    write(tmp_path / "run" / "run.json", {"data": "x"})
    (tmp_path / "run" / "history.csv").symlink_to(tmp_path / "outside.csv")
    assert read_run("run", tmp_path / "run").curves == ()
