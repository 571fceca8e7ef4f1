"""Branches that meet: rows that have become dense on one of them and are windows, or held once, on another."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import QUICK
from torch import nn

import holdfast as hf
from dags import SHAPE, random_dag
from holdfast.bounding import Ascent
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import Coefficients, Window, add, dense
from holdfast.random import Noise

THREATS = [hf.Linf(0.1), hf.L2(0.3), hf.L1(0.5), hf.Sparse(2), hf.Patch(2, 3)]


class Shortcut(nn.Module):
    """relu(conv 1x1 of stride 2 + two convolutions): the shortcut leaves windows small that the others fill."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.one, self.two = nn.Conv2d(inputs, outputs, 3, 2, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, 2)

    def forward(self, x):
        return torch.relu(self.shortcut(x) + self.two(torch.relu(self.one(x))))


def points_of(threat, x, count):
    """Random points of the threat set around x, and for a box its corners."""
    for draw in range(count):
        point = threat.random_start(x, Noise.for_batch(draw, len(x)))
        yield threat.project(x + threat.eps * (point - x).sign(), x) if isinstance(threat, hf.Linf) else point


def contains(model, x, threat, bounds, count=20):
    for point in points_of(threat, x, count):
        logits = model(point)
        assert bool((bounds.lower <= logits).all())
        assert bool((logits <= bounds.upper).all())


@torch.no_grad()
@pytest.mark.parametrize("method", ["crown", "fastlin", "crown-ibp", "alpha-crown"])
def test_shortcuts_of_stride_two_have_bounds(method):
    """At the second one, 3 x 3 convolutions see the whole map and 1 x 1 ones a pixel; most neurons must be unstable."""
    body = [nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), Shortcut(4, 6), Shortcut(6, 8)]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(8 * 2 * 2, 3)).eval()
    x = torch.rand(2, 2, 16, 15)
    for threat in (hf.Linf(0.2), hf.L2(1.0)):
        bounds = hf.bounds(model, x, threat, method, **QUICK.get(method, {}))
        contains(model, x, threat, bounds)
        wide = hf.bounds(model, x, threat, "ibp")
        assert bool((bounds.upper - bounds.lower < 0.8 * (wide.upper - wide.lower)).all())


MAP = (3, 5, 4)


def kinds():
    """Every way to hold rows for the same two inputs, six places and two neurons: dense or windows, shared or not."""
    torch.manual_seed(3)
    index = torch.arange(6)[None]
    made = {
        "dense": Coefficients(torch.randn(2, 12, *MAP)),
        "dense, held once": Coefficients(torch.randn(1, 12, *MAP)),
    }
    for name, size, stride, padding in (("wide", (3, 4), (2, 2), (1, 2)), ("narrow", (1, 1), (2, 2), (0, 0))):
        window = Window(index, (3, 2), stride, padding)
        for inputs, places in ((2, 6), (1, 6), (1, 1)):
            values = torch.randn(inputs, places, 2, MAP[0], *size)
            made[f"{name} windows {inputs} x {places}"] = Coefficients(values, window, clean=False)
    other = replace(made["wide windows 1 x 6"].window, stride=(1, 1), padding=(0, 0))
    made["windows of another stride"] = Coefficients(torch.randn(1, 6, 2, MAP[0], 2, 2), other)
    own = replace(made["wide windows 1 x 6"].window, index=torch.stack([index[0], index[0].flip(0)]))
    made["windows at own places"] = Coefficients(torch.randn(2, 6, 2, MAP[0], 3, 4), own, clean=False)
    return made


def pairs():
    """All pairs of kinds; windows at the places of each input meet only their like, as they do in one pass."""
    alike = [(a, b) for a in kinds() for b in kinds() if ("own" in a) == ("own" in b)]
    return alike + [(a, b) for a in kinds() for b in kinds() if "own" in a and "dense" in b]


@pytest.mark.parametrize(("first", "second"), pairs())
def test_any_two_kinds_of_rows_add_up(first, second):
    a, b = kinds()[first], kinds()[second]
    expected = dense(a, MAP).values + dense(b, MAP).values
    for left, right in ((a, b), (replace(a, scratch=True), b)):
        total = dense(add(left, right, MAP), MAP).values
        assert torch.allclose(total.expand_as(expected), expected, atol=1e-6)


@torch.no_grad()
@settings(max_examples=12)
@given(st.integers(0, 10_000), st.sampled_from(THREATS))
def test_every_bound_contains_what_random_branches_give(seed, threat):
    model, x = random_dag(seed), torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(seed))
    covered = 0
    for method in hf.methods("bounds"):
        if threat.name not in method.threats or method.name == "cap":  # which refuses branches
            continue
        ascent = {"ascent": Ascent(iterations=2, joint=seed % 2 == 0)} if method.name == "alpha-crown" else {}
        contains(model, x, threat, hf.bounds(model, x, threat, method.name, **ascent), count=10)
        covered += 1
    assert covered >= 5


def dense_rows(r, i, neurons):
    """In place of `linear._behind`: rows with all of their coefficients, one for each input and neuron."""
    shape, neurons = r.graph.nodes[i].shape, neurons if neurons.ndim == 2 else neurons[None]
    rows = torch.eye(torch.Size(shape).numel(), dtype=r.region.x.dtype)[neurons]
    rows = torch.stack([rows, -rows], 2).flatten(1, 2).unflatten(2, shape)
    return i, Coefficients(rows), rows.new_zeros(rows.shape[:2])


@torch.no_grad()
@settings(max_examples=12)
@given(st.integers(0, 10_000), st.sampled_from(["crown", "fastlin"]), st.sampled_from([hf.Linf(0.1), hf.L2(0.3)]))
def test_layouts_and_chunks_of_rows_do_not_change_the_bounds(seed, method, threat):
    """Without max pooling: where two values tie for the largest, rounding decides which of them the line follows."""
    model = random_dag(seed, max_pool=False).double()
    x = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(seed)).double()
    settings = {
        "every row by itself": {"_behind": dense_rows},
        "as it is": {},
        "few rows at a time": {"MEMORY": 500},
        "all neurons, rows held once": {"FULL": 0.0},
        "neurons of each input": {"FULL": 2.0},
    }
    found = {}
    for name, changes in settings.items():
        with pytest.MonkeyPatch.context() as patch:
            for attribute, value in changes.items():
                patch.setattr(linear, attribute, value)
            found[name] = hf.bounds(model, x, threat, method, sound=False)
    expected = found.pop("every row by itself")
    for name, bounds in found.items():
        assert torch.allclose(bounds.lower, expected.lower, rtol=1e-9, atol=1e-9), name
        assert torch.allclose(bounds.upper, expected.upper, rtol=1e-9, atol=1e-9), name
