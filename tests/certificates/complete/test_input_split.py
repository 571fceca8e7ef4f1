"""Input splitting: bounds hold for the network as it is run, cuts lose no counter-example, verdicts are exact."""

import copy
import time

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph.ops import evaluate
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.certificates.complete.problem import Conditions
from holdfast.certificates.complete.smear import smear
from holdfast.certificates.complete.sub_boxes import bounded, cut
from holdfast.certificates.complete.zonotope import sweep
from holdfast.errors import UnsupportedError
from holdfast.models.layers import MinMax


class Branches(nn.Module):
    """Two branches with activations of their own, joined: symbols that one branch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(10, 2)

    def forward(self, x):
        a, b = torch.relu(self.a(x)), torch.tanh(self.b(x))
        return self.c(torch.cat([a + b, torch.relu(self.b(x)) - a], 1))


def networks():
    torch.manual_seed(0)
    yield nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU(0.1), nn.Linear(8, 2))
    yield nn.Sequential(nn.Linear(3, 6), nn.Sigmoid(), nn.Linear(6, 2))
    yield Branches()
    yield nn.Sequential(nn.Unflatten(1, (1, 1, 3)), nn.Conv2d(1, 4, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    yield nn.Sequential(nn.Linear(3, 8), MinMax(), nn.Linear(8, 4), MinMax(), nn.Linear(4, 2))
    maps = [nn.Linear(3, 12), nn.Unflatten(1, (1, 3, 4))]
    yield nn.Sequential(*maps, nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(6, 2))
    yield nn.Sequential(*maps, nn.MaxPool2d(3, 2, padding=1, ceil_mode=True), nn.Flatten(), nn.Linear(6, 2))


NETWORKS = [model.eval() for model in networks()]
ROWS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -2.0]]).double()


def double(model):
    return copy.deepcopy(model).double()


def boxes(count, width):
    centre = torch.rand(count, 3).double() * 2 - 1
    half = width * torch.rand(count, 3).double()
    return centre - half, centre + half


@pytest.mark.parametrize("model", NETWORKS)
def test_bounds_of_every_node_hold_for_the_network_as_it_is_run(model):
    lower, upper = boxes(40, 0.5)
    graph, own = trace(double(model), lower), trace(model, lower.float())
    r = Relaxation(graph, Region(lower, upper, lower), True)
    with torch.no_grad():
        sweep(r, torch.float32)
        for share in (0.0, 1.0, *torch.rand(20, 40, 3).double()):
            x = (lower + (upper - lower) * share).float().double().clamp(lower, upper).float()
            inside = ((x.double() >= lower) & (x.double() <= upper)).all(1)
            values = own.walk(x, lambda node, given: evaluate(node.op, given))
            for (low, high), value in zip(r.intervals, values, strict=True):
                assert bool(((value.double() >= low) & (value.double() <= high)).flatten(1).all(1)[inside].all())


@pytest.mark.parametrize("model", NETWORKS)
def test_conditions_are_bounded_and_cuts_keep_every_counter_example(model):
    lower, upper = boxes(60, 0.4)
    graph = trace(double(model), lower)
    with torch.no_grad():
        limits = (graph.forward((lower + upper) / 2) @ ROWS.T).quantile(0.3, 0)  # some boxes meet them, some in part
        conditions = Conditions(ROWS, limits, torch.tensor([0, 0, 1]))
        found = bounded(graph, lower, upper, conditions, torch.float32)
        low, high = cut(lower, upper, found, conditions)
        met = 0
        for share in torch.rand(200, 60, 3).double():
            x = lower + (upper - lower) * share
            excess = graph.forward(x) @ ROWS.T - conditions.limits
            assert bool((excess >= found.excess).all())
            bad = conditions.worst(excess).amin(1) <= 0
            met += int(bad.sum())
            assert bool(((x >= low) & (x <= high)).all(1)[bad].all())
    assert met > 100
    assert bool((high - low < 0.9 * (upper - lower)).any())


@pytest.mark.parametrize("model", NETWORKS)
def test_the_smear_bounds_the_gradient(model):
    lower, upper = boxes(20, 0.5)
    model = double(model)
    graph = trace(model, lower)
    r = Relaxation(graph, Region(lower, upper, lower), True)
    with torch.no_grad():
        sweep(r, torch.float32)
    rows = torch.randn(20, 2).double()
    most = smear(graph, r.intervals, rows)
    for share in torch.rand(20, 20, 3).double():
        x = (lower + (upper - lower) * share).requires_grad_(True)
        (gradient,) = torch.autograd.grad((model(x) * rows).sum(), x)
        assert bool((gradient.abs() <= most + 1e-9).all())


@pytest.mark.parametrize("layer", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1), MinMax()], ids=repr)
def test_maxima_are_decided(layer):
    torch.manual_seed(1)
    values = 64 if isinstance(layer, MinMax) else 16
    body = [nn.Conv2d(2, 4, 3, padding=1), layer, nn.Flatten(), nn.Linear(values, 3)]
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Unflatten(1, (2, 4, 4)), *body).eval()
    for number in (0, 3):
        model[number].weight.data.mul_(2)
    x = torch.rand(8, 2)
    model[-1].bias.data -= model(x).detach().mean(0)  # every class occurs
    y = model(x).argmax(1)
    steps = torch.linspace(-0.2, 0.2, 81)
    grid = (x[:, None] + torch.cartesian_prod(steps, steps)).clamp(0, 1)
    held = torch.stack([(model(some).argmax(1) == label).all() for some, label in zip(grid, y, strict=True)])
    found = hf.certify(model, x, y, hf.Linf(0.2), "input-split")
    assert torch.equal(found.certified, held)
    assert 0 < int(held.sum()) < 8


def test_rounding_in_float32_is_covered_where_it_is_large():
    """1e8 is added and taken away: the network as run gives 0 or 8 where real arithmetic gives x."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).eval()
    with torch.no_grad():
        for p, value in zip(model.parameters(), (1.0, 1e8, 1.0, -1e8), strict=True):
            p.fill_(value)
    lower = torch.tensor([[1.0]]).double()
    graph = trace(double(model), lower)
    conditions = Conditions(torch.ones(1, 1).double(), torch.zeros(1).double(), torch.zeros(1, dtype=torch.int64))
    run = model(torch.ones(1, 1)).item()
    assert run == 0.0
    with torch.no_grad():
        assert bounded(graph, lower, lower, conditions, torch.float32).excess.item() <= run
        assert bounded(graph, lower, lower, conditions, torch.float64).excess.item() > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_it_certifies_what_milp_certifies(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3)).eval()
    x = torch.rand(8, 3)
    y = model(x).argmax(1)
    for eps in (0.05, 0.3):
        exact = hf.certify(model, x, y, hf.Linf(eps), "milp").certified
        found = hf.certify(model, x, y, hf.Linf(eps), "input-split")
        assert torch.equal(found.certified, exact)
        assert bool((found.margin[found.certified] > 0).all())


def test_a_layer_without_a_rule_is_named():
    model = nn.Sequential(nn.Linear(2, 4), nn.ELU(), nn.Linear(4, 2)).eval()
    with pytest.raises(UnsupportedError, match=r"layer '1': input splitting has no rule for 'elu'"):
        hf.certify(model, torch.rand(1, 2), torch.tensor([0]), hf.Linf(0.1), "input-split")


def test_time_is_kept_where_nothing_can_be_decided():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).eval()
    x = torch.full((1, 12), 0.5)
    start = time.monotonic()
    hf.certify(model, x, model(x).argmax(1), hf.Linf(0.2), "input-split", time_limit=0.5)
    assert time.monotonic() - start < 0.5 * 1.1 + 1
