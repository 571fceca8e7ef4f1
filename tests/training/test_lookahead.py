"""Lookahead: the slow weights of a slow reference, for every optimiser, and the same run when it is resumed."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.data import Dataset, Split
from holdfast.training.lookahead import with_lookahead
from holdfast.training.muon import Muon
from holdfast.training.optimizer import make_optimizer
from holdfast.training.recipe.recipe import OptimizerPart

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "muon": lambda p: Muon(p, lr=0.05, momentum=0.9, weight_decay=0.0),
}


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_the_published_algorithm(name):
    torch.manual_seed(0)
    targets = torch.randn(11, 3, 2)
    ours, fast = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))
    optimizer = with_lookahead(MAKERS[name]([ours]), every=4, rate=0.3)
    plain, slow = MAKERS[name]([fast]), torch.zeros(3, 2)
    for k, target in enumerate(targets, 1):
        for parameter, run in ((ours, optimizer), (fast, plain)):
            parameter.grad = 2 * (parameter.detach() - target)
            run.step()
        if k % 4 == 0:
            slow = slow + 0.3 * (fast.detach() - slow)
            fast.data.copy_(slow)
        assert torch.allclose(ours, fast, atol=1e-6)
    assert not torch.allclose(ours, torch.zeros(3, 2))


def test_the_recipe_makes_it():
    net = nn.Linear(2, 2)
    part = OptimizerPart(name="nadam", lr=0.1, lookahead=1, lookahead_rate=0.5)
    before = net.weight.detach().clone()
    optimizer = make_optimizer(part, net)
    assert type(optimizer) is torch.optim.NAdam
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moved = (net.weight.detach() - before).abs()
    plain = nn.Linear(2, 2)
    plain.load_state_dict({"weight": before, "bias": torch.zeros(2)})
    other = make_optimizer(OptimizerPart(name="nadam", lr=0.1), plain)
    plain(torch.ones(1, 2)).sum().backward()
    other.step()
    assert torch.allclose(2 * moved, (plain.weight.detach() - before).abs(), atol=1e-6)


def test_a_run_resumes_where_it_stopped_and_writes_its_gap(tmp_path):
    recipe = {
        "name": "m",
        "threat": "linf:0.1",
        "epochs": 2,
        "batch_size": 64,
        "model": {"name": "mlp", "hidden": [16]},
        "objective": {"name": "at"},
        "attack": {"name": "pgd", "steps": 1},
        "optimizer": {"name": "nadam", "lr": 0.01, "lookahead": 7},
        "budget": {"name": "log", "end": 1},
        "evaluate": {"attack_steps": 3, "count": 200, "gap": True},
    }
    data = hf.load_data("mnist-mini")
    whole = hf.train(recipe, data=data, out=tmp_path / "whole")
    hf.train({**recipe, "epochs": 1}, data=data, out=tmp_path / "parts")
    again = hf.train({**recipe, "epochs": 2}, data=data, out=tmp_path / "parts", resume=True)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    row = whole.history[-1]
    assert {"gap_clean", "gap_robust"} <= set(row)
    for key in ("clean", "robust"):  # accuracies of 200 inputs each
        seen = row[f"gap_{key}"] + row[f"validation_{key}"]
        assert 0 < seen <= 1
        assert (200 * seen) % 1 == pytest.approx(0, abs=1e-6) or (200 * seen) % 1 == pytest.approx(1, abs=1e-6)


def test_the_gap_of_a_network_that_knows_its_training_inputs_by_heart():
    """Labels are random: only memory helps, so the accuracy on new inputs stays at chance."""
    torch.manual_seed(0)
    x, y = torch.rand(80, 12), torch.randint(0, 2, (80,))
    recipe = {
        "epochs": 150,
        "batch_size": 40,
        "validation": 0.5,
        "model": {"name": "mlp", "input_shape": [12], "classes": 2, "hidden": [128]},
        "objective": {"name": "standard"},
        "optimizer": {"name": "nadam", "lr": 0.02},
        "evaluate": {"gap": True, "attack_steps": 0},
    }
    data = Dataset("noise", Split(x, y), Split(x[:2], y[:2]), ("a", "b"))
    row = hf.train(recipe, data=data, progress=False).history[-1]
    assert row["gap_clean"] + row["validation_clean"] == 1
    assert row["gap_clean"] > 0.2
