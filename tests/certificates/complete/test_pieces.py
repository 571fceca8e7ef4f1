"""Maxima and clippings as ReLUs: the same function, and exact verdicts once they are split."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.complete.beta_crown import decide
from holdfast.certificates.complete.milp import exact_margin
from holdfast.certificates.complete.pieces import in_pieces
from holdfast.models.layers import MinMax

LAYERS = {
    "pool": lambda: [nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)],
    "overlapping pool": lambda: [nn.Conv2d(1, 2, 3), nn.MaxPool2d((3, 2), 1), nn.Flatten(), nn.Linear(16, 3)],
    "minmax": lambda: [nn.Conv2d(1, 4, 3), MinMax(), nn.Flatten(), nn.Linear(80, 6), MinMax(), nn.Linear(6, 3)],
    "clipping": lambda: [nn.Flatten(), nn.Linear(42, 5), nn.Hardtanh(-0.5, 0.25), nn.ReLU6(), nn.Linear(5, 3)],
}


def network(name, seed=0, factor=2.0):
    torch.manual_seed(seed)
    model = nn.Sequential(*LAYERS[name]()).eval()
    for parameter in model.parameters():
        parameter.data.mul_(factor)
    return model, torch.rand(6, 1, 6, 7)


@pytest.mark.parametrize("name", LAYERS)
def test_the_function_stays_and_only_relus_are_left(name):
    model, x = network(name)
    made = in_pieces(trace(model, 20 * x))
    assert torch.allclose(made.forward(20 * x), model(20 * x), atol=1e-4)
    assert not any(isinstance(node.op, ops.MaxPool | ops.MinMax) for node in made.nodes)
    assert {node.op.kind for node in made.nodes if isinstance(node.op, ops.Activation)} == {"relu"}


def test_what_is_not_easy_stays():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(3, 2, padding=1)).eval()
    graph = trace(model, torch.rand(1, 1, 6, 7))
    assert [type(node.op) for node in in_pieces(graph).nodes] == [type(node.op) for node in graph.nodes]
    pooled = trace(nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)).eval(), torch.rand(1, 1, 6, 7))
    assert len(in_pieces(pooled, maxima=False).nodes) == len(pooled.nodes)


@pytest.mark.parametrize(("name", "seed"), [("pool", 1), ("pool", 2), ("overlapping pool", 0), ("minmax", 0)])
def test_verdicts_are_the_exact_ones(name, seed):
    model, x = network(name, seed)
    y, threat = model(x).argmax(1), hf.Linf(0.06)
    ours = decide(model, x, y, threat, time_limit=20)
    truth = exact_margin(model, x, y, threat, time_limit=20)
    assert ours.status == truth.status
    assert bool((ours.margin <= truth.margin + 1e-6).all())
    assert int(ours.parts.sum()) > 0 or name == "minmax"


@pytest.mark.parametrize("method", ["beta-crown", "input-split", "milp", "auto"])
def test_clippings_are_decided_as_a_fine_grid_says(method):
    torch.manual_seed(0)
    layers = [nn.Linear(2, 12), nn.Hardtanh(-0.5, 0.25), nn.Linear(12, 12), nn.ReLU6(), nn.Linear(12, 3)]
    model = nn.Sequential(*layers).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    x = torch.rand(12, 2)
    model[-1].bias.data -= model(x).detach().mean(0)  # every class occurs
    y, steps = model(x).argmax(1), torch.linspace(-0.2, 0.2, 81)
    grid = (x[:, None] + torch.cartesian_prod(steps, steps)).clamp(0, 1)
    held = torch.stack([(model(some).argmax(1) == label).all() for some, label in zip(grid, y, strict=True)])
    found = hf.certify(model, x, y, hf.Linf(0.2), method)
    assert torch.equal(found.certified, held)
    assert 0 < int(held.sum()) < 12
