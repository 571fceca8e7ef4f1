"""The dual bound equals Fast-Lin; the printed signs of one source do not; random projections converge to it."""

from itertools import pairwise

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.cap import cap
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import dual
from holdfast.bounding.linear import relaxation as linear
from holdfast.certificates.cap import cap_margins
from holdfast.errors import UnsupportedError
from holdfast.random import Noise

THREATS = [hf.Linf(0.08), hf.L2(0.3), hf.L1(0.5), hf.Linf(0.3)]


def mlp(*sizes, dtype=torch.float32):
    layers = [nn.Linear(sizes[0], sizes[1])]
    for a, b in pairwise(sizes[1:]):
        layers += [nn.ReLU(), nn.Linear(a, b)]
    return nn.Sequential(*layers).to(dtype).eval()


def nets():
    torch.manual_seed(3)
    conv = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    )
    return {"mlp": (mlp(6, 16, 16, 12, 4), (6,)), "conv": (conv.eval(), (2, 7, 5))}


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", nets())
def test_the_dual_bound_equals_fastlin(name, threat):
    model, shape = nets()[name]
    x = torch.rand(5, *shape)
    y = model(x).argmax(1)
    graph, r = trace(model, x), region(threat, x, sound=False)
    relaxed = linear.relaxation(graph, r, slopes="parallel", hidden=True, sound=False)
    p = dual.polytope(graph, r)
    assert sum(int((g > 0).sum()) for g in p.gaps.values()) > 20, "some neurons are unstable"
    scale = float(linear.margin_bounds(relaxed, y).detach().abs().max())
    assert torch.allclose(dual.margin_bounds(p, y), linear.margin_bounds(relaxed, y), atol=1e-5 * max(scale, 1))
    for ours, theirs in zip(dual.output_bounds(p), linear.output_bounds(relaxed), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5 * max(scale, 1))


def test_the_printed_signs_do_not_give_a_bound():
    """Written out for two hidden layers: the corrected dual is the bound, the printed one exceeds what is true.

    As printed: only the bias of the first layer, - eps |xi| in an upper bound, the ReLU terms with the wrong sign.
    """
    model = mlp(3, 8, 8, 2, dtype=torch.float64)
    x, threat = torch.rand(20, 3, dtype=torch.float64) * 0.4 + 0.3, hf.Linf(0.1)
    graph, r = trace(model, x), region(threat, x, sound=False)
    p = dual.polytope(graph, r)
    (w1, b1), (w2, b2), (w3, b3) = ((layer.weight.detach(), layer.bias.detach()) for layer in model[::2])
    points = threat.random_start(x.repeat(200, 1), Noise.for_batch(0, 4000))
    broken = []
    for label, c in ((0, w3.new_tensor([-1.0, 1.0])), (1, w3.new_tensor([1.0, -1.0]))):
        nu3 = -c
        nuhat2 = (nu3 @ w3).expand(20, -1)
        nuhat1 = (p.slopes[4] * nuhat2) @ w2
        xi = (p.slopes[2] * nuhat1) @ w1
        cost = sum((-nuhat.clamp(max=0) * p.gaps[i]).sum(1) for i, nuhat in ((2, nuhat1), (4, nuhat2)))
        biases = nu3 @ b3 + (p.slopes[4] * nuhat2) @ b2 + (p.slopes[2] * nuhat1) @ b1
        corrected = cost - biases - (xi * x).sum(1) + 0.1 * xi.abs().sum(1)
        ours = -dual.margin_bounds(p, torch.full((20,), label))[:, 1 - label]
        assert torch.allclose(corrected, ours, atol=1e-12)
        printed = -cost - (p.slopes[2] * nuhat1) @ b1 - (xi * x).sum(1) - 0.1 * xi.abs().sum(1)
        worst = (model(points) @ c).view(200, 20).amax(0)
        assert bool((worst <= corrected).all())
        broken.append(bool((worst > printed).any()))
    assert any(broken)


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_ten_thousand_points_stay_within_the_dual_bounds(threat):
    model, shape = nets()["mlp"]
    x = torch.rand(1, *shape)
    points = threat.random_start(x.expand(10_000, *shape), Noise.for_batch(1, 10_000))
    for sound in (False, True):
        bounds = cap(model, x, threat, sound=sound)
        slack = 0 if sound else 1e-5
        assert bool((model(points) >= bounds.lower - slack).all())
        assert bool((model(points) <= bounds.upper + slack).all())


def test_hidden_boxes_are_tighter_than_intervals_on_average():
    model, shape = nets()["mlp"]
    x = torch.rand(20, *shape)
    graph, r = trace(model, x), region(hf.Linf(0.1), x, sound=False)
    p = dual.polytope(graph, r)
    plain = linear.relaxation(graph, r, slopes=None, hidden=False, sound=False)
    for i in (3, 5):
        ours, theirs = ((b[1] - b[0]).mean() for b in (p.boxes[i], plain.intervals[i]))
        assert ours < theirs


def test_small_chunks_do_not_change_the_bound(monkeypatch):
    model, shape = nets()["conv"]
    x = torch.rand(3, *shape)
    r = region(hf.L2(0.2), x, sound=False)
    y = torch.tensor([0, 1, 2])
    whole = dual.margin_bounds(dual.polytope(trace(model, x), r), y)
    monkeypatch.setattr(linear, "MEMORY", 1000)
    assert torch.allclose(whole, dual.margin_bounds(dual.polytope(trace(model, x), r), y), atol=1e-5)


def test_gradients_equal_finite_differences():
    model = mlp(3, 6, 6, 2, dtype=torch.float64)
    x, y = torch.rand(2, 3, dtype=torch.float64), torch.tensor([0, 1])

    def bound(weight):
        with torch.no_grad():
            model[2].weight.copy_(weight)
        return dual.margin_bounds(dual.polytope(trace(model, x), region(hf.Linf(0.1), x, sound=False)), y).sum()

    start = model[2].weight.detach().clone()
    (gradient,) = torch.autograd.grad(bound(start), [model[2].weight])
    for i, j in ((0, 0), (2, 3), (5, 1)):
        step = torch.zeros_like(start)
        step[i, j] = 1e-6
        finite = (bound(start + step) - bound(start - step)).item() / 2e-6
        assert abs(gradient[i, j].item() - finite) < 1e-5


def test_what_the_dual_does_not_cover_is_refused_by_name():
    x = torch.rand(1, 5)
    smooth, _ = tiny_nets()["smooth"]
    with pytest.raises(UnsupportedError, match=r"layer '1'.*'sigmoid'.*fastlin"):
        cap(smooth, x, hf.Linf(0.1))
    residual, shape = tiny_nets()["residual"]
    with pytest.raises(UnsupportedError, match="without branches"):
        cap_margins(trace(residual, torch.rand(1, *shape)), None, None, sound=False)
    pooled, shape = tiny_nets()["pooled"]
    with pytest.raises(UnsupportedError, match="MaxPool"):
        cap(pooled, torch.rand(1, *shape), hf.Linf(0.1))


@pytest.mark.parametrize("threat", THREATS[:3], ids=str)
def test_the_certificate_with_rounding_is_fastlin(threat):
    model, shape = nets()["conv"]
    x = torch.rand(6, *shape)
    y = model(x).argmax(1)
    ours, theirs = (hf.certify(model, x, y, threat, method) for method in ("cap", "fastlin"))
    assert torch.equal(ours.margin, theirs.margin)
    assert set(ours.by) <= {"", "cap"}
    plain = hf.certify(model, x, y, threat, "cap", sound=False)
    assert bool((plain.margin >= ours.margin).all())
    assert torch.allclose(plain.margin, ours.margin, atol=1e-3)
