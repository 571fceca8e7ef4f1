"""Gradients for the input of a first layer that is trained: the values of torch, in full or in their sum."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.models import make_model
from holdfast.training.fast.free_gradients import FreeGradients
from holdfast.training.objectives.upat import upat

GEOMETRIES = [
    {"stride": 4},
    {"stride": 2, "padding": 1},
    {"stride": (1, 3), "padding": (0, 2), "dilation": (2, 1)},
    {"groups": 2},
    {"padding": "same"},
]


def gradients(x, parameters, upstream, mode, geometry):
    leaf = x.clone().requires_grad_(True)
    seen = leaf * 1
    with mode(seen):
        out = F.conv2d(seen, *parameters, **geometry)
    return out, torch.autograd.grad(out, [leaf, *parameters], upstream)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_torch(geometry, dtype, bias):
    torch.manual_seed(0)
    groups = geometry.get("groups", 1)
    x = torch.rand(5, 2, 12, 9, dtype=dtype)
    parameters = [torch.randn(32, 2 // groups, 5, 3, dtype=dtype, requires_grad=True)]
    parameters += [torch.randn(32, dtype=dtype, requires_grad=True)] if bias else []
    expected_out = F.conv2d(x, *parameters, **geometry)
    upstream = torch.randn_like(expected_out)
    _, expected = gradients(x, parameters, upstream, lambda _: nullcontext(), geometry)
    for mode, summed in ((lambda _: FreeGradients(), False), (FreeGradients, True)):
        out, found = gradients(x, parameters, upstream, mode, geometry)
        assert torch.equal(out, expected_out)
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-4)
        ours, theirs = (g.sum(0) if summed else g for g in (found[0], expected[0]))
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def test_it_is_taken_where_weights_and_input_ask_for_a_gradient():
    conv, x = nn.Conv2d(3, 16, 4, stride=2), torch.rand(2, 3, 8, 8)
    names = []
    for free, trained in ((True, True), (False, True), (True, False)):
        conv.requires_grad_(trained)
        with FreeGradients():
            names.append(type(conv(x.clone().requires_grad_(free)).grad_fn).__name__)
        with FreeGradients(), hf.reference():
            assert "Trained" not in type(conv(x.clone().requires_grad_(True)).grad_fn).__name__
    assert ["Trained" in name for name in names] == [True, False, False]


def test_it_can_be_differentiated_twice():
    conv, x = nn.Conv2d(1, 16, 3, stride=2).double(), torch.rand(2, 1, 5, 5, dtype=torch.float64)
    found = []
    for mode in (FreeGradients(), nullcontext()):
        point = x.clone().requires_grad_(True)
        with mode:
            (first,) = torch.autograd.grad(conv(point).square().sum(), point, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [point, *conv.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs)


class Squared(nn.Module):
    """What reaches its convolution is no longer the shared perturbation."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 4, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    def forward(self, x):
        return self.body(x**2) + self.body(x)


@pytest.mark.parametrize("patterns", [1, 2, "per-slot"])
@pytest.mark.parametrize("architecture", ["cnn", "vit", "normalised", "squared"])
def test_pyramid_training_is_the_same_in_reference_mode(architecture, patterns):
    shape, small = {"input_shape": (3, 8, 8), "classes": 4, "seed": 0}, {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8}
    torch.manual_seed(0)
    model = {
        "cnn": lambda: make_model("small-star", **shape),
        "vit": lambda: make_model("vit-ti", patch=4, **small, **shape),
        "normalised": lambda: make_model("small-star", normalize=(0.4, 0.2), **shape),
        "squared": Squared,
    }[architecture]()
    x, y = torch.rand(6, 3, 8, 8), torch.arange(6) % 4
    found = []
    for reference in (False, True):
        state = {"pyramid_1": torch.full((6 if patterns == "per-slot" else patterns, 3, 8, 8), 0.01)}
        model.zero_grad()
        options = {"levels": (1,), "multipliers": (1.0,), "radius": 0.1, "step": 0.05, "patterns": patterns}
        with hf.reference() if reference else nullcontext():
            loss, _ = upat(model, x, y, make_context(x, state=state), **options)
            loss.backward()
        found.append((loss, state["pyramid_1"], [p.grad.clone() for p in model.parameters()]))
    (loss, levels, by_weights), (true_loss, true_levels, true_by_weights) = found
    assert torch.equal(loss, true_loss)
    assert levels.abs().max() > 0.01
    assert torch.allclose(levels, true_levels)
    for ours, theirs in zip(by_weights, true_by_weights, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_shared_gradient_is_the_sum_over_the_batch():
    torch.manual_seed(0)
    model = make_model("small-star", input_shape=(3, 8, 8), classes=4)
    x, y, delta = torch.rand(6, 3, 8, 8), torch.arange(6) % 4, torch.zeros(1, 3, 8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(cross_entropy(model(x + delta), y), delta)
    x_adv = x + delta
    with FreeGradients(x_adv):
        loss = cross_entropy(model(x_adv), y)
    assert torch.allclose(torch.autograd.grad(loss, delta)[0], expected, rtol=1e-4, atol=1e-7)
