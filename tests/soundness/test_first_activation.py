"""Models that start with an activation: every proof is that of the same model behind a layer that does nothing."""

import pytest
import torch
from nets import QUICK, QUICK_ATTACKS
from torch import nn

import holdfast as hf
from holdfast.bounding import interval
from holdfast.bounding.core.region import region
from holdfast.bounding.fast import patches as local
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import projected
from holdfast.bounding.linear.forward import forward_planes
from holdfast.bounding.linear.relaxation import concretise, relaxation
from holdfast.models.layers import MinMax
from holdfast.random import Noise

WIDE = {"low": -1.0, "high": 1.0}  # so that a ReLU of the input is open
THREATS = [
    hf.Linf(0.05, **WIDE),
    hf.L2(0.1, **WIDE),
    hf.L1(0.15, **WIDE),
    hf.Sparse(1, **WIDE),
    hf.Patch(1, 2, **WIDE),
]


class Fork(nn.Module):
    """The input meets an activation and a layer, and is added to the first."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return torch.cat([torch.relu(x) + x, self.conv(x)], 1)


def models():
    torch.manual_seed(2)
    front = {
        "relu": [nn.ReLU(), nn.Conv2d(2, 4, 3, 2, 1)],
        "tanh": [nn.Tanh(), nn.Conv2d(2, 4, 3, 2, 1)],
        "minmax": [MinMax(), nn.Conv2d(2, 4, 3, 2, 1)],
        "maxpool": [nn.MaxPool2d(2, 1), nn.Conv2d(2, 4, 3, 2, 1)],
        "flat relu": [nn.Flatten(), nn.LeakyReLU(0.2), nn.Unflatten(1, (2, 5, 4)), nn.Conv2d(2, 4, 3, 2, 1)],
        "fork": [Fork(), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1)],
    }
    ends = {name: [nn.ReLU(), nn.Flatten(), nn.Linear(16 if name == "maxpool" else 24, 3)] for name in front}
    return {name: nn.Sequential(*front[name], *ends[name]).eval() for name in front}


def behind_nothing(model):
    """The same function, with a 1 x 1 convolution in front that returns its input."""
    same = nn.Conv2d(2, 2, 1)
    with torch.no_grad():
        same.weight.copy_(torch.eye(2)[:, :, None, None])
        same.bias.zero_()
    return nn.Sequential(same, *model).eval()


X = torch.rand(3, 2, 5, 4, generator=torch.Generator().manual_seed(0)) * 1.6 - 0.8


def run(kind, name, model, y, threat):
    if kind == "bounds":
        return hf.bounds(model, X, threat, name, **QUICK.get(name, {})).lower
    bounds_only = {"time_limit": 0.0} if name == "auto" else {}  # without the search that the clock ends
    return hf.certify(model, X, y, threat, name, **QUICK.get(name, {}) | bounds_only).margin


def agree(model, y, threat, name):
    """A search decides both models alike, or the clock ended one of them; on small balls something is decided."""
    ours, theirs = (hf.certify(m, X, y, threat, name, time_limit=0.5) for m in (model, behind_nothing(model)))
    broken = [(model(found.x_adv).argmax(1) != y) & threat.contains(found.x_adv, X) for found in (ours, theirs)]
    assert not bool((ours.certified & broken[1] | theirs.certified & broken[0]).any()), name
    assert threat.name == "sparse" or bool(
        (ours.certified | broken[0]).any() and (theirs.certified | broken[1]).any()
    ), name


@torch.no_grad()
@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("front", models())
def test_every_proof_is_that_of_the_model_behind_a_layer_that_does_nothing(front, threat):
    model = models()[front]
    y, covered = model(X).argmax(1), set()
    for kind in ("bounds", "certify"):
        for method in hf.methods(kind):
            if threat.name not in method.threats or getattr(method, "smoothed", False):
                continue
            if getattr(method, "complete", False) and method.name != "milp":  # a search, which the clock may end
                agree(model, y, threat, method.name)
                continue
            try:
                theirs = run(kind, method.name, behind_nothing(model), y, threat)
            except hf.UnsupportedError:  # MaxPool in the dual bound, tanh in MILP, no centroids
                continue
            ours = run(kind, method.name, model, y, threat)
            covered.add(method.name)
            if method.name == "slope-step":  # starts from random slopes
                continue
            # Rounding of the layer that does nothing costs a little; a step of an optimiser may end elsewhere.
            near = 1e-2 if method.name in ("alpha-crown", "nonuniform") else 2e-4
            if (front, threat.name, method.name) == ("tanh", "sparse", "alpha-crown"):  # its lines are optimised too
                near = 3e-2
            early = (ours > 0) & (method.name == "auto")  # which stops at the first proof
            assert bool(((ours >= theirs - near) | early).all()), (kind, method.name)
            # Where a convolution reads the input, on a ball the dual norm bounds it; not if a layer is in front of it.
            assert front == "fork" or torch.allclose(ours, theirs, atol=near), (kind, method.name)
    assert {"ibp", "crown", "fastlin", "crown-ibp", "alpha-crown", "auto"} <= covered


@torch.no_grad()
@pytest.mark.parametrize("front", models())
def test_bounds_contain_and_radii_hold(front):
    model = models()[front]
    y = model(X).argmax(1)
    for threat in THREATS:
        logits = torch.stack([model(threat.random_start(X, Noise.for_batch(draw, len(X)))) for draw in range(30)])
        own = logits.gather(2, y.expand(len(logits), -1)[..., None])
        margin = (own - logits).scatter(2, y.expand(len(logits), -1)[..., None], torch.inf).amin((0, 2))
        for method in ("ibp", "crown", "alpha-crown"):
            bounds = hf.bounds(model, X, threat, method, **QUICK.get(method, {}))
            assert bool(((bounds.lower <= logits) & (logits <= bounds.upper)).all())
        for method in ("slope-step", "auto"):
            assert bool((hf.certify(model, X, y, threat, method).margin <= margin).all())
    for norm in ("linf", "l2"):
        ours, theirs = (hf.radius(m, X, y, norm, "pec", low=-1.0, high=1.0) for m in (model, behind_nothing(model)))
        assert bool((ours > 0).any())
        assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("front", ["relu", "tanh", "fork"])
def test_bounds_for_training_know_it_too(front):
    model, threat = models()[front], hf.Linf(0.05, **WIDE)
    graphs, y = [trace(m, X) for m in (model, behind_nothing(model))], model(X).argmax(1)
    ours, theirs = (
        concretise(relaxed(g, threat), forward_planes(g, region(threat, X, sound=False), y)) for g in graphs
    )
    assert torch.allclose(ours, theirs, atol=1e-5)
    patch = hf.Patch(1, 2, **WIDE)
    corners = torch.tensor([[0, 0], [2, 1]]).view(1, 2, 1, 2).expand(len(X), -1, -1, -1)
    lower, upper = patch.boxes(X, corners[0, :, 0])
    for graph in graphs:
        whole = interval.margin_bounds(
            graph, lower.flatten(0, 1), upper.flatten(0, 1), y.repeat_interleave(2), sound=False
        )
        parts = local.margin_bounds(graph, X, y, patch, corners, reach=2.0)
        assert torch.allclose(parts.flatten(0, 1), whole, atol=1e-5)
    if front != "fork":  # concatenations have no random projection
        noise = Noise.for_batch(0, len(X))
        ours, theirs = (
            projected.estimate(g, region(threat, X, sound=False), noise=noise, projections=2000).margins(y)
            for g in graphs
        )
        assert torch.allclose(ours, theirs, atol=0.1)


def relaxed(graph, threat):
    return relaxation(graph, region(threat, X, sound=False), slopes="parallel", hidden=False, sound=False)


@pytest.mark.parametrize("front", ["relu", "tanh"])
def test_it_can_be_audited(front):
    model = models()[front]
    y = model(X).argmax(1)
    audit = hf.audit(model, (X, y), hf.Linf(0.05, **WIDE), budgets=2, budget="quick", progress=False)
    assert audit.certified[0] > 0
    found = hf.attack(model, X, y, hf.Linf(0.05, **WIDE), "pgd", **QUICK_ATTACKS["pgd"])
    assert not bool((found.success & torch.tensor([r.certified == 0.05 for r in audit.records])).any())
