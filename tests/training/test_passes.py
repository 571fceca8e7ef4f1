"""What a step costs in passes beside its attack: the trace and averaging add none, S2O and AWP one forward and back."""

import pytest
import torch
from torch import nn

import holdfast as hf

PARTS = {
    "base": {},
    "trh": {"regularizers": {"trh": {"weight": 1e-3}}},
    "swa": {"average": {"name": "ema", "decay": 0.995}},
    "s2o": {"regularizers": {"s2o": {}}},
    "awp": {"perturb_weights": {"name": "awp"}},
}


class Counted(nn.Module):
    """A network that counts its passes while it is in training mode."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
        self.forwards = self.backwards = 0

    def forward(self, x):
        if self.training:
            self.forwards += 1
        out = self.net(x)
        if self.training and out.requires_grad:
            out.register_hook(self.count)
        return out

    def count(self, gradient):
        self.backwards += 1


@pytest.fixture(scope="module")
def passes():
    torch.manual_seed(0)
    found = {}
    split = hf.data.Split(torch.rand(40, 1, 5, 4), torch.arange(40) % 2)
    data = hf.data.Dataset("toy", split, split, ("a", "b"))
    for name, parts in PARTS.items():
        model = Counted()
        recipe = {
            "epochs": 1,
            "batch_size": 10,
            "threat": "linf:0.05",
            "validation": 0.0,
            "objective": {"name": "at"},
            "attack": {"name": "pgd", "steps": 3},
            "optimizer": {"lr": 0.01},
            **parts,
        }
        hf.train(recipe, model=model, data=data, progress=False)
        found[name] = (model.forwards / 4, model.backwards / 4)
    return found


def test_passes_of_a_step(passes):
    """The attack runs in eval mode and is not counted. By passes alone S2O costs as much as AWP."""
    assert passes["base"] == passes["trh"] == passes["swa"] == (1, 1)
    assert passes["s2o"] == passes["awp"] == (2, 2)
