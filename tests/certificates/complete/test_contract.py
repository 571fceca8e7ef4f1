"""Contraction keeps every counter-example, and is unit propagation on clauses."""

import torch
from torch import nn

from holdfast.bounding.graph.trace import trace
from holdfast.certificates.complete.contract import contract
from holdfast.certificates.complete.problem import Conditions


def conditions(rows, limits):
    rows = torch.tensor(rows).double()
    return Conditions(rows, torch.tensor(limits).double(), torch.zeros(len(rows), dtype=torch.int64))


def clauses(*signed, variables):
    """Output 0 is the sum of relu(1 - literals that hold) over the clauses; 0 if all of them hold."""
    model = nn.Sequential(nn.Linear(variables, len(signed)), nn.ReLU(), nn.Linear(len(signed), 1)).double().eval()
    weight, bias = torch.zeros(len(signed), variables), torch.ones(len(signed))
    for i, clause in enumerate(signed):
        for literal in clause:
            weight[i, abs(literal) - 1] = -1.0 if literal > 0 else 1.0
            bias[i] -= float(literal < 0)
    model[0].weight.data, model[0].bias.data = weight.double(), bias.double()
    model[2].weight.data, model[2].bias.data = torch.ones(1, len(signed)).double(), torch.zeros(1).double()
    return trace(model, torch.zeros(1, variables).double())


def test_every_counter_example_stays_in_the_box():
    kept = less = 0
    for seed in range(6):
        torch.manual_seed(seed)
        slope = 0.1 * (seed % 2)
        model = nn.Sequential(nn.Linear(3, 7), nn.LeakyReLU(slope), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
        for layer in model[::2]:
            layer.weight.data.mul_(2)
        points = torch.rand(20_000, 3) * 2 - 1
        values = model(points).double().detach()
        asked = conditions([[1.0, 0.0], [0.3, -1.0]], values.quantile(0.05, 0).mul(torch.tensor([1.0, 0.0])).tolist())
        double = trace(model.double(), points[:1].double())
        corners = torch.rand(20, 2, 3).double() * 2 - 1
        low, high = corners.amin(1), corners.amax(1)
        small, large = contract(double, low, high, asked, torch.float32)
        hit = asked.least(values) <= 0
        for i in range(len(low)):
            inside = hit & ((points >= low[i]) & (points <= high[i])).all(1)
            at = points[inside].double()
            assert bool(((at >= small[i]) & (at <= large[i])).all())
            kept += len(at)
        less += int((large - small < 0.9 * (high - low)).any(1).sum())
    assert kept > 1000
    assert less > 10


def test_clauses_are_propagated_and_contradictions_leave_nothing():
    chain = clauses((1, 2), (-2, 3), (-3, -4), variables=4)
    asked = conditions([[1.0]], [0.0])
    low, high = torch.zeros(2, 4).double(), torch.ones(2, 4).double()
    high[0, 0] = 0.0  # the first variable is false, so 2 and 3 are true and 4 is false
    small, large = contract(chain, low, high, asked, torch.float64)
    assert torch.allclose(small[0], torch.tensor([0.0, 1, 1, 0]).double(), atol=1e-6)
    assert torch.allclose(large[0], torch.tensor([0.0, 1, 1, 0]).double(), atol=1e-6)
    assert torch.equal(small[1], low[1])
    low[0, 3] = 1.0
    small, large = contract(chain, low, high, asked, torch.float64)
    assert bool((small[0] > large[0]).any())
    assert bool((small[1] <= large[1]).all())


def test_an_overflow_takes_nothing_away():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
    for layer in model[::2]:
        layer.weight.data.fill_(1e30)
    low, high = torch.zeros(1, 2).double(), torch.ones(1, 2).double()
    graph = trace(model.double(), low)
    small, large = contract(graph, low, high, conditions([[1.0]], [-1.0]), torch.float32)
    assert torch.equal(small, low)
    assert torch.equal(large, high)
