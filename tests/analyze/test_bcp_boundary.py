"""The tightness of balls and boxes, and the picture of the verification boundary."""

from itertools import permutations
from xml.etree import ElementTree

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.analyze.bcp_boundary import boundary_svg, tau, verification_boundary
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.certificates.bcp import bcp
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise


@pytest.fixture(params=["mlp", "cnn", "residual"])
def task(request):
    net, shape = tiny_nets()[request.param]
    torch.manual_seed(3)
    x = torch.rand(5, *shape)
    return net, x, net(x).argmax(1)


def test_tau_is_the_mean_fall_over_all_pairs():
    net, shape = tiny_nets()["mlp"]
    torch.manual_seed(3)
    x, y = torch.rand(5, *shape), torch.zeros(5, dtype=torch.long)
    falls = torch.zeros(5)
    for pair in permutations(range(3), 2):
        two = nn.Sequential(*net[:-1], nn.Linear(16, 2)).eval()
        with torch.no_grad():
            two[-1].weight.copy_(net[-1].weight[list(pair)])
            two[-1].bias.copy_(net[-1].bias[list(pair)])
            logits = two(x)
        falls += logits[:, 0] - logits[:, 1] - bcp(two, x, y, hf.L2(0.3), sound=False).margin
    assert torch.allclose(tau(net, x, hf.L2(0.3)).boxed, falls / 6, rtol=1e-4)


def test_tau_is_never_above_that_of_the_plain_bound_and_equals_it_where_the_box_is_idle(task):
    net, x, _ = task
    found = tau(net, x, hf.L2(0.3))
    classes = net(x).shape[1]
    pairs = lipschitz_bound(trace(net, x)).pairs
    assert found.plain.tolist() == pytest.approx([0.3 * float(pairs.sum()) / (classes * (classes - 1))] * 5, rel=1e-3)
    assert bool((found.boxed <= found.plain * (1 + 1e-5)).all())
    linear = nn.Linear(6, 3).eval()
    inner = torch.full((2, 6), 0.5)
    idle = tau(linear, inner, hf.L2(0.01))
    assert torch.allclose(idle.boxed, idle.plain, rtol=1e-4)
    assert bool((tau(linear, inner, hf.L2(2.0)).boxed < tau(linear, inner, hf.L2(2.0)).plain).all())


def test_tau_does_not_depend_on_the_chunk(task):
    net, x, _ = task
    whole, parts = tau(net, x, hf.L2(0.2)), tau(net, x, hf.L2(0.2), chunk=2)
    assert torch.allclose(whole.boxed, parts.boxed, atol=1e-6)
    assert tau(net, x[:1], hf.L2(0.2)).boxed.shape == (1,)


@pytest.mark.parametrize("eps", [0.05, 0.5])
def test_attacks_and_samples_lie_on_the_safe_side(task, eps):
    net, x, y = task
    threat = hf.L2(eps)
    for i in range(3):
        b = verification_boundary(net, x[i : i + 1], y[i : i + 1], threat, attack_steps=20)
        own, other = b.classes
        assert own == int(y[i])
        assert other != own
        assert b.plain <= b.boxed + 1e-5
        assert b.boxed <= b.logits[0] - b.logits[1] + 1e-6
        for pair in b.attacked.values():
            assert pair[0] - pair[1] >= b.boxed - 1e-5
        points = threat.random_start(x[i : i + 1].repeat(200, *[1] * (x.ndim - 1)), Noise.for_batch(i, 200))
        logits = net(points).detach()
        assert bool((logits[:, own] - logits[:, other] >= b.boxed - 1e-5).all())
        # The plain bound touches the ellipse.
        assert min(p[0] - p[1] for p in b.ellipse) == pytest.approx(b.plain, abs=2e-3 * (1 + abs(b.plain)))


def test_the_bounds_are_those_of_the_certificate_for_two_classes():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.rand(1, 4)
    y = net(x).argmax(1)
    b = verification_boundary(net, x, y, hf.L2(0.1), attack_steps=5)
    assert b.boxed == pytest.approx(bcp(net, x, y, hf.L2(0.1), sound=False).margin.item(), abs=1e-5)


def test_the_picture_is_well_formed_and_tells_the_verdict(task):
    net, x, y = task
    verdicts = []
    for eps in (1e-4, 5.0):
        b = verification_boundary(net, x[:1], y[:1], hf.L2(eps), attack_steps=3)
        names = [f"<{i}>" for i in range(net(x).shape[1])]
        root = ElementTree.fromstring(boundary_svg(b, title="a & b", names=names))
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert "a & b" in texts
        assert f"logit of <{b.classes[0]}> (label)" in texts
        verdicts += [text for text in texts if text in ("verified", "not verified")]
        polygon = next(root.iter("{http://www.w3.org/2000/svg}polygon"))
        outline = [tuple(map(float, pair.split(","))) for pair in polygon.get("points").split()]
        width, height = (float(v) for v in root.get("viewBox").split()[2:])
        assert all(0 <= a <= width and 0 <= b <= height for a, b in outline)
        assert len(list(root.iter("{http://www.w3.org/2000/svg}line"))) == 6
    assert verdicts == ["verified", "not verified"]


def test_bad_input_is_refused(task):
    net, x, y = task
    with pytest.raises(InputError, match="one input, got a batch of 5"):
        verification_boundary(net, x, y, hf.L2(0.1))
    with pytest.raises(UnsupportedError, match="sparse"):
        tau(net, x, hf.Sparse(2))
