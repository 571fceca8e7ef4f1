"""Guided backpropagation against hooks, by hand, and as the control that a sanity check fails."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.errors import UnsupportedError
from holdfast.explanations.evaluate.randomise import randomised


def by_hooks(model, x, y):
    """Gradients clamped at every ReLU module by hooks."""
    handles = [
        m.register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0].clamp(min=0),))
        for m in model.modules()
        if isinstance(m, nn.ReLU)
    ]
    x = x.clone().requires_grad_(True)
    model(x).gather(1, y[:, None]).sum().backward()
    for handle in handles:
        handle.remove()
    return x.grad


@pytest.mark.parametrize("name", ["mlp", "cnn", "pooled"])
def test_it_is_what_hooks_give(name):
    model, shape = tiny_nets()[name]
    x, y = torch.rand(5, *shape), torch.tensor([0, 1, 2, 0, 1])
    found = hf.explain(model, x, y, "guided-backprop", chunk=2)
    torch.testing.assert_close(found.attribution, by_hooks(model, x, y))
    assert not torch.allclose(found.attribution, hf.explain(model, x, y, "saliency").attribution)


def test_by_hand():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    model[0].weight.data, model[0].bias.data = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.zeros(2)
    model[2].weight.data, model[2].bias.data = torch.tensor([[-1.0, 2.0], [0.0, 1.0]]), torch.zeros(2)
    found = hf.explain(model, torch.tensor([[1.0, 1.0]]), torch.tensor([0]), "guided-backprop")
    assert found.attribution.tolist() == [[6.0, -2.0]]  # the first unit speaks against the class and is dropped
    with pytest.raises(UnsupportedError, match="the model has none"):
        hf.explain(nn.Linear(2, 2).eval(), torch.rand(1, 2), torch.tensor([0]), "guided-backprop")


def test_it_keeps_more_of_itself_than_saliency_when_the_top_layers_are_destroyed():
    torch.manual_seed(0)
    data = hf.load_data("mnist-mini")
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 5, 1, 2), nn.ReLU(), nn.Conv2d(8, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(784, 10)),
    )
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for i in range(60):
        rows = slice(64 * i, 64 * i + 64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data.train.x[rows]), data.train.y[rows]).backward()
        optimizer.step()
    x, y = data.test.x[:24], data.test.y[:24]
    kept = {name: randomised(net.eval(), x, y, name).correlation.mean(1) for name in ("saliency", "guided-backprop")}
    assert bool((kept["guided-backprop"][1:3] > kept["saliency"][1:3] + 0.1).all())
