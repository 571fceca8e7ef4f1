"""How many inputs are worked on at a time."""

import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core import batches
from holdfast.attacks.core.batches import fitting, kept_bytes
from holdfast.attacks.fast.lean import Lean


def test_kept_bytes_by_hand():
    """The dense layers keep their input and the output of tanh, which tanh keeps too; weights are not counted."""
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).double().eval().requires_grad_(False)
    assert kept_bytes(model, torch.rand(7, 10).double()) == 7 * 20 * 8
    assert kept_bytes(model, torch.rand(14, 10).double()) == 14 * 20 * 8


def test_the_form_of_a_network_that_keeps_most_decides(monkeypatch):
    monkeypatch.setattr(batches, "LARGE_INPUT", 50)
    monkeypatch.setattr(batches, "MEMORY", 10 * 4 * 50)
    narrow = nn.Sequential(nn.Tanh(), nn.Linear(50, 3)).eval().requires_grad_(False)
    wide = nn.Sequential(nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 3)).eval().requires_grad_(False)
    x = torch.rand(20, 50)
    assert [fitting(form, x, 256) for form in (narrow, wide)] == [10, 5]
    assert fitting(Lean(narrow), x, 256) == 10
    assert fitting(Lean(narrow, wide), x, 256) == fitting(Lean(wide, narrow), x, 256) == 5


def test_only_large_inputs_are_measured_and_chunks_fit(monkeypatch):
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.top, self.sizes = nn.Linear(50, 3), []

        def forward(self, x):
            self.sizes.append((len(x), torch.is_grad_enabled()))
            return self.top(x.tanh())

    torch.manual_seed(0)
    model, x = Watched().eval(), torch.rand(12, 50)
    y = model(x).argmax(1)
    assert fitting(model, x, 256) == 256
    small = hf.attack(model, x, y, hf.Linf(0.05), "pgd", steps=3)
    monkeypatch.setattr(batches, "LARGE_INPUT", 50)
    monkeypatch.setattr(batches, "MEMORY", 5 * kept_bytes(model, x[:1]))
    assert fitting(model, x, 256) == 5
    assert fitting(model, x, 2) == 2
    monkeypatch.setattr(batches, "MEMORY", 1)
    assert fitting(model, x, 256) == 1
    monkeypatch.setattr(batches, "MEMORY", 5 * kept_bytes(model, x[:1]))
    model.sizes.clear()
    result = hf.attack(model, x, y, hf.Linf(0.05), "pgd", steps=3)
    assert max(count for count, graph in model.sizes if graph) == 5
    assert torch.equal(result.success, small.success)
    assert torch.allclose(result.x_adv, small.x_adv)
