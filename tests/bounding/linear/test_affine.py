import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.affine import interval_margins, is_affine
from holdfast.bounding.linear.relaxation import relaxation


def linear_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.BatchNorm1d(4)).eval()


def test_an_activation_makes_a_network_more_than_affine():
    found = {name for name, (model, shape) in tiny_nets().items() if is_affine(trace(model, torch.rand(1, *shape)))}
    assert found == {"linear"}
    assert is_affine(trace(linear_net(), torch.rand(1, 6)))


@pytest.mark.parametrize("threat", [hf.Linf(0.1), hf.L2(0.2), hf.Sparse(2)], ids=str)
@pytest.mark.parametrize("sound", [False, True])
def test_how_many_inputs_are_worked_on_at_a_time_does_not_matter(threat, sound, monkeypatch):
    x = torch.rand(7, 6)
    graph, y, r = trace(linear_net(), x), torch.arange(7) % 4, region(threat, x, sound=sound)
    relaxed = relaxation(graph, r, slopes=None, hidden=False, sound=sound)
    whole = interval_margins(graph, relaxed, y)
    monkeypatch.setattr(linear, "MEMORY", 2 * 4 * 6)
    assert torch.allclose(interval_margins(graph, relaxed, y), whole, atol=1e-6)


@pytest.mark.parametrize("threat", [hf.Linf(0.1), hf.L2(0.2), hf.L1(0.2), hf.Sparse(2)], ids=str)
def test_gradients_reach_the_first_layer(threat):
    model, x = linear_net().double(), torch.rand(3, 6, dtype=torch.float64)
    y, r = torch.tensor([0, 1, 3]), region(threat, x, sound=False)

    def total():
        graph, _ = trace_batch(model, x)
        return interval_margins(graph, relaxation(graph, r, slopes=None, hidden=False, sound=False), y).sum()

    weight, step = model[0].weight, 1e-6 * torch.randn(5, 6, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(total(), [weight])
    with torch.no_grad():
        weight += step
        above = total()
        weight -= 2 * step
        change = (above - total()) / 2
    assert torch.allclose((gradient * step).sum(), change, rtol=1e-4, atol=1e-10)
