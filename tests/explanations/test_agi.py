"""Adversarial gradient integration by hand, and that it adds up."""

import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from explain_tasks import linear, middle


def test_agi_adds_up_along_its_paths():
    model, x = linear(), middle(5)
    y = model(x).argmax(1)
    found = hf.explain(model, x, y, "agi")
    assert float(found.error.max()) < 1e-9
    assert "paths that reached another class" in found.by[0]
    net, shape = tiny_nets()["smooth"]
    net[0].weight.data *= 5
    points = torch.rand(5, *shape)
    rough, fine = (
        hf.explain(net, points, net(points).argmax(1), "agi", step_size=size, steps=steps).error
        for size, steps in ((0.05, 10), (0.005, 100))
    )
    assert float(fine.mean()) < 0.2 * float(rough.mean())


def test_agi_by_hand_on_a_linear_model():
    """z = (1, 6 u - v): steps of 0.05 along (+, -) until 6 u - v > 1, each worth -0.05 (6, -1) of z_1's gradient."""
    model = nn.Linear(2, 2).double().eval()
    model.weight.data = torch.tensor([[0.0, 0.0], [6.0, -1.0]], dtype=torch.float64)
    model.bias.data = torch.tensor([1.0, 0.0], dtype=torch.float64)
    x = torch.tensor([[0.2, 0.5]], dtype=torch.float64)  # 0.7: one step adds 0.35
    found = hf.explain(model, x, torch.tensor([0]), "agi", classes=1, step_size=0.05, steps=9, quantity="margin")
    # f = z_0 - z_1 has the gradient (-6, 1); minus the step (0.05, -0.05) times that is (0.3, 0.05).
    torch.testing.assert_close(found.attribution, torch.tensor([[0.3, 0.05]], dtype=torch.float64))
