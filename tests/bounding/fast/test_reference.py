"""Fast paths give what the plain code gives, up to rounding: bounds, certificates and gradients, both ways."""

import pytest
import torch
from nets import tiny_nets
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.bounding.core.region import region
from holdfast.bounding.fast import patches
from holdfast.bounding.fast.layout import channels_last
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.linear import dual
from holdfast.bounding.linear import relaxation as linear
from holdfast.utils.reference import reference

NETS = ("cnn", "mlp", "residual")


def both(call):
    fast = call()
    with reference():
        return fast, call()


def task(name):
    model, shape = tiny_nets()[name]
    x = torch.rand(6, *shape, generator=torch.Generator().manual_seed(3))
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("threat", [hf.Linf(0.03), hf.L2(0.2)], ids=str)
@pytest.mark.parametrize("method", ["ibp", "crown", "crown-ibp", "fastlin", "alpha-crown"])
@pytest.mark.parametrize("name", NETS)
def test_bounds_and_margins_are_the_same(name, method, threat, sound):
    model, x, y = task(name)
    # The term for rounding grows with the zeros that a window leaves out; an ascent takes differences further.
    tolerance = 1e-3 if sound else 3e-5 if method == "alpha-crown" else 1e-5
    fast, plain = both(lambda: hf.bounds(model, x, threat, method, sound=sound))
    assert torch.allclose(fast.lower, plain.lower, atol=tolerance)
    assert torch.allclose(fast.upper, plain.upper, atol=tolerance)
    fast, plain = both(lambda: hf.certify(model, x, y, threat, method, sound=sound))
    assert torch.allclose(fast.margin, plain.margin, atol=tolerance)
    assert torch.equal(fast.certified, plain.certified)


@pytest.mark.parametrize("sound", [True, False])
def test_the_dual_network_is_the_same(sound):
    model, x = image_network().eval(), torch.rand(6, 1, 7, 9, generator=torch.Generator().manual_seed(3))
    y = model(x).argmax(1)
    fast, plain = both(lambda: hf.certify(model, x, y, hf.Linf(0.03), "cap", sound=sound).margin)
    assert torch.allclose(fast, plain, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"pool": 2}, {"early": True}], ids=str)
def test_the_certificate_against_patches_is_the_same(options):
    model, x, y = task("cnn")
    fast, plain = both(lambda: hf.certify(model, x, y, hf.Patch(2, 2), "patch", **options).margin)
    assert torch.allclose(fast, plain, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_windows_around_patches_are_the_same(size):
    model, x, y = task("cnn")
    threat, graph = hf.Patch(2, 2), trace(model, x)
    corners = threat.locations(tuple(x.shape[1:]))
    corners = corners[: len(corners) // size * size].view(-1, size, 2).expand(len(x), -1, -1, -1)
    fast, plain = both(lambda: patches.margin_bounds(graph, x, y, threat, corners, 0.3))
    assert torch.allclose(fast, plain, atol=1e-5)


def image_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(5 * 2 * 3, 6), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip


@pytest.mark.parametrize("bound", ["ibp", "crown-ibp", "crown", "cap"])
def test_losses_of_training_and_their_gradients_are_the_same(bound):
    model, x = image_network(), torch.rand(8, 1, 7, 9, generator=torch.Generator().manual_seed(1))
    y, seen = torch.arange(8) % 3, []

    def step():
        images = channels_last(x)
        graph, logits = trace_batch(model, images, unroll=bound == "ibp")
        seen.append((images.stride(1), any(isinstance(node.op, ops.Unroll) for node in graph.nodes)))
        r = region(hf.Linf(0.05), images, sound=False)
        if bound == "cap":
            margins = dual.margin_bounds(dual.polytope(graph, r), y)
        else:
            slopes = None if bound == "ibp" else "adaptive"
            relaxed = linear.relaxation(graph, r, slopes=slopes, hidden=bound == "crown", sound=False)
            low, high = relaxed.intervals[-1]
            margins = low - high if bound == "ibp" else linear.margin_bounds(relaxed, y)
        loss = cross_entropy(-margins, y) + cross_entropy(logits, y)
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    fast, plain = both(step)
    assert seen == [(1, bound == "ibp"), (63, False)]
    for ours, theirs in zip(fast, plain, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
