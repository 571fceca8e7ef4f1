"""The log of a run: every update and every example, also after an interruption, and what it says when it is missing."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from holdfast.errors import InputError
from holdfast.training import Interrupted, train
from holdfast.training.logs import (
    dead_layers,
    distance,
    product_of_norms,
    read_examples,
    read_updates,
    share_examples,
)
from holdfast.training.state import RunState
from holdfast.training.workers import Workers

LOG = {"log.updates": True, "log.losses": True}


def plain_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))


def test_updates_are_those_of_an_independent_loop(toy_data, tmp_path):
    """One batch for each epoch: full gradient descent, whose path is easily repeated."""
    recipe = {"epochs": 3, "batch_size": 100, "validation": 0, "objective": {"name": "standard"}}
    recipe["optimizer"] = {"lr": 0.5, "momentum": 0.0}
    train(recipe, plain_model(), toy_data, out=tmp_path / "run", **LOG)
    model, start = plain_model(), plain_model()
    rows = read_updates(tmp_path / "run")
    assert [(row["epoch"], row["batch"]) for row in rows] == [(1, 1), (2, 1), (3, 1)]
    losses = []
    for row in rows:
        each = cross_entropy(model(toy_data.train.x), toy_data.train.y, reduction="none")
        model.zero_grad()
        each.mean().backward()
        losses.append(each.detach())
        squares = sum(float((p.grad**2).sum()) for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
            pairs = zip(model.parameters(), start.parameters(), strict=True)
            moved = sum(float(((p - q) ** 2).sum()) for p, q in pairs)
        assert row["gradient_norm"] == pytest.approx(squares**0.5, rel=1e-4)
        assert row["distance"] == pytest.approx(moved**0.5, rel=1e-4)
        assert row["loss"] == pytest.approx(float(each.detach().mean()), rel=1e-5)
        assert row["dead"] == ""
    torch.testing.assert_close(read_examples(tmp_path / "run"), torch.stack(losses).double(), rtol=1e-4, atol=1e-5)


def test_a_dead_layer_is_named_from_the_update_on_that_killed_it(toy_recipe, toy_data, tmp_path):
    model = plain_model()
    model[1].bias.data.fill_(-1e3)
    train(toy_recipe, model, toy_data, out=tmp_path / "run", epochs=1, **LOG)
    assert {row["dead"] for row in read_updates(tmp_path / "run")} == {"2"}
    assert dead_layers(plain_model(), toy_data.train.x) == []


def test_the_history_has_the_product_of_the_norms(toy_data):
    recipe = {
        "epochs": 2,
        "batch_size": 50,
        "validation": 0,
        "objective": {"name": "standard"},
        "optimizer": {"lr": 0.1},
    }
    result = train(recipe, plain_model(), toy_data, progress=False, **{"log.norms": True})
    spectral = [float(torch.linalg.matrix_norm(result.model[i].weight.detach(), 2)) for i in (1, 3)]
    assert result.history[-1]["norms"] == pytest.approx(spectral[0] * spectral[1], rel=1e-4)
    assert result.history[0]["norms"] != result.history[1]["norms"]
    assert "norms" not in train(recipe, plain_model(), toy_data, progress=False).history[0]


def test_the_product_of_norms_of_convolutions():
    """Against the operator of the convolution written out."""
    model = nn.Sequential(nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).double()
    unit = torch.eye(64, dtype=torch.float64).view(64, 1, 8, 8)
    first = nn.functional.conv2d(unit, model[0].weight, None, 2, 1).flatten(1)
    expected = [float(torch.linalg.matrix_norm(m.detach(), 2)) for m in (first, model[3].weight)]
    found, exact = product_of_norms(model, unit), expected[0] * expected[1]
    assert 0.99 * exact < found < (1 + 1e-9) * exact


def test_a_model_without_norms_is_refused_before_the_first_step(toy_data):
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.Softmax(1), nn.Linear(8, 2))
    recipe = {
        "epochs": 1,
        "batch_size": 50,
        "validation": 0,
        "objective": {"name": "standard"},
        "optimizer": {"lr": 0.1},
    }
    with pytest.raises(InputError, match=r"log\.norms"):
        train(recipe, model, toy_data, progress=False, **{"log.norms": True})


def test_an_interrupted_run_writes_the_same_log(toy_recipe, toy_data, tmp_path, make_toy_model, monkeypatch):
    train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "whole", **LOG)
    calls = 0

    def killing(model, start):
        nonlocal calls
        calls += 1
        if calls == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return distance(model, start)

    monkeypatch.setattr("holdfast.training.logs.distance", killing)
    with pytest.raises(Interrupted):
        train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "run", **LOG)
    other = make_toy_model()
    nn.init.zeros_(other[1].weight)  # the distance is from the first start, not from the model that is given now
    train(toy_recipe, other, toy_data, out=tmp_path / "run", resume=True, **LOG)
    assert read_updates(tmp_path / "run") == read_updates(tmp_path / "whole")
    for what in ("loss", "error", "norm"):
        found = [read_examples(tmp_path / name, what) for name in ("run", "whole")]
        assert found[0].shape == (4, 56)
        assert torch.equal(*found)


@pytest.mark.parametrize("objective", ["at", "trades", "mart", "alp", "ibp", "free"])
def test_every_objective_logs_the_loss_under_the_budget(toy_recipe, toy_data, tmp_path, objective):
    """A linear model that stands still: the worst loss in the ball has a closed form, which no clean term equals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 2)).double()
    toy_recipe = {key: value for key, value in toy_recipe.items() if key != "attack"}
    changes = {"validation": 0, "epochs": 1, "objective": {"name": objective}, "log.losses": True}
    changes["optimizer"] = {"lr": 1e-12, "momentum": 0.0}
    x, y = toy_data.train.x.double(), toy_data.train.y
    train(toy_recipe, model, toy_data, out=tmp_path / "run", **changes)
    w, found = model[1].weight.detach(), read_examples(tmp_path / "run")[0]
    slope = (w[y] - w[1 - y]).view_as(x)
    down, up = (x - 0.05).clamp(0, 1) - x, (x + 0.05).clamp(0, 1) - x
    with torch.no_grad():
        margin = (model(x) * torch.where(y[:, None] == torch.arange(2), 1.0, -1.0)).sum(1)
    moves = [(slope * torch.where(slope > 0, *pair)).flatten(1).sum(1) for pair in ((down, up), (up, down))]
    worst, best, clean = (nn.functional.softplus(-(margin + move)) for move in (*moves, 0.0))
    # The divergence has a maximum on both sides, and TRADES may climb the wrong one.
    gap = torch.minimum((found - worst).abs(), (found - best).abs()) if objective == "trades" else found - worst
    assert float(gap.abs().max()) < 1e-3
    assert float((found - clean).abs().min()) > 0.01


def test_without_a_log_the_error_says_how_to_write_one(toy_recipe, toy_data, tmp_path):
    train(toy_recipe, plain_model(), toy_data, out=tmp_path / "run", epochs=1)
    with pytest.raises(InputError, match=r"--set log.updates=true"):
        read_updates(tmp_path / "run")
    with pytest.raises(InputError, match=r"\[log\] losses = true"):
        read_examples(tmp_path / "run")


def test_a_threat_that_pgd_does_not_know_is_refused_at_once(toy_recipe, toy_data):
    recipe = {key: value for key, value in toy_recipe.items() if key != "attack"}
    recipe |= {"threat": "patch:2x2", "objective": {"name": "patch"}, "log": {"losses": True}}
    with pytest.raises(InputError, match=r"log.losses: the loss under 'patch"):
        train(recipe, plain_model(), toy_data)


def test_examples_of_several_processes_are_put_together():
    nan = float("nan")
    parts = [torch.tensor([1.0, nan, nan]), torch.tensor([nan, 2.0, nan])]

    class Two(Workers):
        def gather(self, tensor):
            return parts

    model = plain_model()
    run = RunState(model, torch.optim.SGD(model.parameters(), lr=1.0), None, data=0)
    run.objective["log_loss"] = parts[0]
    share_examples(run, Two(0, 2))
    torch.testing.assert_close(run.objective["log_loss"], torch.tensor([1.0, 2.0, nan]), equal_nan=True)
