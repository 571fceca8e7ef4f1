"""Certificates of centroid networks: the geometry, the corrected theorems, rounding, and attacks inside the radius."""

import copy
import math
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.certificates.centroid import border, depths, separation
from holdfast.errors import InputError, UnsupportedError
from holdfast.models import Normalize
from holdfast.models.layers import MinMax
from holdfast.models.zoo.centroid import Centroid, CentroidNet, with_rejection
from holdfast.random import Noise

ATTACKS = (("pgd", {"steps": 10}), ("apgd-ce", {"steps": 12}), ("deepfool", {"steps": 10}))
WIDE = {"low": -50.0, "high": 50.0}


def plain_net(classes=3, features=2, per_class=2, eta=None, seed=0, dtype=torch.float64):
    """Features are the inputs themselves: radii are distances in feature space."""
    torch.manual_seed(seed)
    net = CentroidNet(nn.Identity(), Centroid(classes, features, per_class=per_class), eta=eta)
    nn.init.normal_(net.head.weight)
    return net.to(dtype).eval()


def line_net(eta):
    """Two classes on a line, one apart."""
    net = plain_net(2, 2, 1, eta)
    net.head.weight.data = torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]]], dtype=torch.float64)
    return net


def body(kind):
    torch.manual_seed(1)
    if kind == "conv":
        layers = (nn.Conv2d(1, 4, 3, 2, 1), MinMax(), nn.Flatten(), nn.Linear(36, 6))
        return nn.Sequential(Normalize(0.5, 0.25), *layers), (1, 6, 5)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4)), (3,)


def trained(kind="dense", per_class=2, steps=80, dtype=torch.float32):
    """A network that tells three blobs apart, their points, and their labels."""
    layers, shape = body(kind)
    torch.manual_seed(2)
    net = CentroidNet(layers, Centroid(3, layers[-1].out_features, per_class=per_class)).to(dtype)
    y = torch.arange(90) % 3
    x = (torch.rand(3, *shape)[y] * 0.8 + 0.2 * torch.rand(90, *shape)).to(dtype)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(4 * net(x), y).backward()
        optimizer.step()
    return net.eval(), x, y


def answers(net, x):
    with torch.no_grad():
        return net(x).argmax(1)


@given(st.floats(0.05, 0.95), st.integers(2, 4), st.integers(0, 99))
@settings(max_examples=15)
def test_the_border_is_a_sphere_of_apollonius(eta, features, seed):
    torch.manual_seed(seed)
    c, other = torch.randn(2, features, dtype=torch.float64)
    z = 3 * torch.randn(50, features, dtype=torch.float64)
    ratio = (1 - eta) / (1 + eta)
    centre = c - (1 - eta) ** 2 / (4 * eta) * (other - c)
    radius = (1 - eta**2) / (4 * eta) * (other - c).norm()
    found = border((z - c).norm(dim=1), (z - other).norm(dim=1), (c - other).norm(), ratio)
    assert torch.allclose(found, radius - (z - centre).norm(dim=1), atol=1e-9)


def test_without_rejection_the_border_is_the_bisector():
    c, other = torch.randn(2, 3, dtype=torch.float64)
    z = torch.randn(20, 3, dtype=torch.float64)
    normal = (c - other) / (c - other).norm()
    expected = (z - (c + other) / 2) @ normal
    assert torch.allclose(border((z - c).norm(dim=1), (z - other).norm(dim=1), (c - other).norm(), 1.0), expected)


@pytest.mark.parametrize("eta", [0.0, 0.2, 0.7])
def test_depths_bound_the_distance_to_the_regions(eta):
    """Against many points: nothing of another region nearer than it says; and the sign is that of the answer."""
    net = plain_net(3, 2, 2, eta)
    z = torch.randn(40, 2, dtype=torch.float64)
    found = depths(net.head, z, net.ratio)
    label = answers(net, z)
    for j in range(3):
        assert torch.equal(found[:, j] >= 0, label == j)
    grid = torch.cartesian_prod(*[torch.linspace(-5, 5, 300, dtype=torch.float64)] * 2)
    there = answers(net, grid)
    for j in range(3):
        outside, inside = grid[there != j], grid[there == j]
        assert bool((torch.cdist(z, outside).amin(1) >= found[:, j] - 1e-9).all())
        assert bool((torch.cdist(z, inside).amin(1) >= -found[:, j] - 1e-9).all())
    own = label < 3
    gap = torch.stack([torch.cdist(z[i : i + 1], grid[there != label[i]]).min() for i in own.nonzero()[:, 0]])
    gap = gap - found[own, label[own]]
    assert float(gap.median()) < 0.05  # the bound is met, up to the step of the grid


@pytest.mark.parametrize("slack", [1e-12, 1e-6])
def test_slack_moves_depths_to_the_safe_side(slack):
    for ratio in (1.0, 0.9, 0.3, 0.0):
        net = plain_net(3, 4, 2)
        z = torch.cat([torch.randn(50, 4, dtype=torch.float64), net.head.weight.detach().flatten(0, 1)])
        low, exact, high = (depths(net.head, z, ratio, slack=s) for s in (slack, 0.0, -slack))
        assert bool((low <= exact).all())
        assert bool((exact <= high).all())
        assert float((high - low).max()) < 10 * slack**0.5


def test_the_printed_theorem_8_is_wrong_and_the_corrected_one_is_tight():
    """Two answered inputs of different classes may be eta d_min / K apart; (1 + eta) d_min / K is printed."""
    net, eta = line_net(0.2), 0.2
    a, b = (torch.tensor([[place, 0.0]], dtype=torch.float64) for place in (0.4 - 1e-9, 0.6 + 1e-9))
    assert answers(net, torch.cat([a, b])).tolist() == [0, 1]
    apart = float((a - b).norm())
    assert apart < (1 + eta) * 1.0
    assert separation(net, a, **WIDE) == pytest.approx(eta, rel=1e-6)
    assert separation(net, a, **WIDE) <= apart
    # Without rejection nothing is apart, though d_min / K is printed.
    assert separation(line_net(0.0), a, **WIDE) == pytest.approx(0, abs=1e-9)


def test_the_printed_theorem_9_is_wrong_and_the_corrected_one_is_tight():
    """At an answered input the nearest class stays within eta d_min / (2 K); (1 + eta) d_min / (2 K) is printed."""
    eta, x = 0.2, torch.tensor([[0.4 - 1e-9, 0.0]], dtype=torch.float64)
    assert answers(line_net(eta), x).tolist() == [0]
    net = line_net(None)
    assert answers(net, x + torch.tensor([0.11, 0.0])).tolist() == [1]
    assert (1 + eta) / 2 > 0.11
    radius = hf.certify(net, x, torch.tensor([0]), hf.L2(0.01, **WIDE), "centroid").radius
    assert float(radius) == pytest.approx(eta / 2, rel=1e-6)


@given(st.integers(2, 4), st.integers(1, 3), st.floats(0.01, 0.5), st.integers(0, 99))
@settings(max_examples=15)
def test_the_certificates_are_ordered_as_the_theorems_say(classes, per_class, eta, seed):
    net = plain_net(classes, 3, per_class, eta, seed)
    x = torch.randn(60, 3, dtype=torch.float64)
    label = answers(net, x)
    threat = hf.L2(0.01, **WIDE)
    stays, alone = (hf.certify(net, x, label, threat, "centroid", may_reject=m).radius for m in (False, True))
    bare = with_rejection(net, None).eval()
    plain = hf.certify(bare, x, answers(bare, x), threat, "centroid").radius
    c, z = net.head.weight.detach(), x
    distance = torch.cdist(z, c.flatten(0, 1))
    labels = torch.arange(classes).repeat_interleave(per_class)
    near, j = distance.min(1)
    rival = distance.masked_fill(labels == labels[j][:, None], torch.inf).amin(1)
    smallest = torch.cdist(c.flatten(0, 1), c.flatten(0, 1))[labels[:, None] != labels].min()
    small = 1e-6
    assert bool((plain >= (rival - near) / 2 - small).all())
    answered = label < classes
    assert bool((plain[answered] >= eta * smallest / 2 - small).all())
    assert bool((alone[answered] >= eta * smallest - small).all())
    assert bool((alone[answered] >= separation(net, x, **WIDE) - small).all())
    assert bool((stays[answered] <= alone[answered]).all())
    assert torch.equal(stays[~answered], alone[~answered])


def test_with_one_centroid_each_the_radius_is_the_distance_to_the_cell():
    net = plain_net(4, 2, 1)
    x = torch.randn(30, 2, dtype=torch.float64)
    y = answers(net, x)
    radius = hf.certify(net, x, y, hf.L2(0.01, **WIDE), "centroid").radius
    c = net.head.weight.detach()[:, 0]
    for i in range(30):
        own = c[y[i]]
        cell = [float((x[i] - (own + o) / 2) @ (own - o) / (own - o).norm()) for j, o in enumerate(c) if j != y[i]]
        assert float(radius[i]) == pytest.approx(min(cell), abs=1e-6)


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("eta", [None, 0.05, 0.2])
def test_no_attack_changes_what_is_proved(kind, eta):
    """Answered inputs keep their answer, rejected ones are rejected; on the network as it is run."""
    net, x, _ = trained(kind)
    net = with_rejection(net, eta)
    x = torch.cat([x, torch.rand(60, *x.shape[1:])])
    y = answers(net, x)
    assert eta is None or 0 < int((y == 3).sum()) < len(x)
    radius = hf.certify(net, x, y, hf.L2(0.01), "centroid").radius
    for share in (0.3, 0.9):
        threat = hf.L2(0.9999 * float(radius.quantile(share)))
        result = hf.certify(net, x, y, threat, "centroid")
        assert torch.equal(result.certified, radius > threat.eps)
        inside = result.certified
        for attack, options in ATTACKS:
            assert not bool(hf.attack(net, x[inside], y[inside], threat, attack, **options).success.any())
    far = hf.attack(net, x, y, hf.L2(20 * float(radius.median())), "pgd").success
    assert float(far.float().mean()) > 0.3  # the attacks would have found something


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_no_attack_turns_an_answer_into_another_one(kind):
    net, x, _ = trained(kind)
    net = with_rejection(net, 0.05)
    y = answers(net, x)
    x, y = x[y < 3], y[y < 3]
    strict, radius = (hf.certify(net, x, y, hf.L2(0.01), "centroid", may_reject=m).radius for m in (False, True))
    assert bool((radius > strict).all())
    bare = with_rejection(net, None).eval()

    def turned(eps):
        """Pushed towards other classes, whatever the rejection says on the way."""
        points = [hf.attack(bare, x, y, hf.L2(eps), name, **options).x_adv for name, options in ATTACKS]
        points += [hf.attack(net, x, y, hf.L2(eps), "pgd", loss="margin", steps=10).x_adv]
        points += [hf.L2(eps).random_start(x, Noise.for_batch(i, len(x))) for i in range(5)]
        found = torch.zeros(len(x), dtype=torch.bool)
        for point in points:
            label = answers(net, point)
            found |= (label != y) & (label < 3)
        return found

    for share in (0.2, 0.6, 0.95):
        eps = 0.9999 * float(radius.quantile(share))
        certified = hf.certify(net, x, y, hf.L2(eps), "centroid", may_reject=True).certified
        assert bool(certified.any())
        assert not bool((turned(eps) & certified).any())
    assert bool(turned(8 * float(radius.median())).any())


def test_a_constant_that_is_too_small_is_caught(monkeypatch):
    """The attacks of these tests are strong enough to see one that is half of the true one."""
    module = import_module("holdfast.certificates.centroid")
    monkeypatch.setattr(module, "_constant", lambda constants: 0.5 * float(constants.pairs.max()) / math.sqrt(2))
    torch.manual_seed(0)
    net = CentroidNet(nn.Linear(3, 3), Centroid(3, 3), eta=0.05).eval()
    x = torch.rand(60, 3)
    y = answers(net, x)
    radius = hf.certify(net, x, y, hf.L2(0.01), "centroid").radius
    threat = hf.L2(float(radius.median()))
    certified = hf.certify(net, x, y, threat, "centroid").certified
    assert bool((hf.attack(net, x, y, threat, "pgd", steps=10).success & certified).any())


def test_the_separation_of_a_trained_network_holds():
    net, x, _ = trained()
    net = with_rejection(net, 0.1)
    gap = separation(net, x)
    points = torch.rand(3000, 3)
    label = answers(net, points)
    points, label = points[label < 3], label[label < 3]
    assert len(label.unique()) > 1
    apart = torch.cdist(points, points)[label[:, None] != label].min()
    assert 0 < gap <= float(apart)
    assert separation(net, x, sound=False) >= gap


def test_rounding_is_accounted_for_where_it_matters():
    """Far from the origin float32 has few digits left: what is proved must hold for the network as it is run."""
    net = line_net(0.3).float()
    shift = 4096.0
    net.head.weight.data[..., 0] += shift
    x = torch.stack([shift + torch.linspace(0.2, 0.5, 200), torch.zeros(200)], 1)
    y = answers(net, x)
    threat = hf.L2(0.01, low=0.0, high=5000.0)
    sound, loose = (hf.certify(net, x, y, threat, "centroid", sound=s) for s in (True, False))
    assert bool((sound.radius <= loose.radius).all())
    assert bool((sound.radius > 0).any())
    for i in range(20):
        noise = torch.randn(200, 2, generator=torch.Generator().manual_seed(i))
        step = noise / noise.norm(dim=1, keepdim=True) * sound.radius[:, None]
        moved = answers(net, x + 0.999 * step)
        assert not bool(((moved != y) & (sound.radius > 0)).any())
    double = hf.certify(net.double(), x.double(), y, threat, "centroid").radius
    assert float((double - sound.radius).max()) > 1e-5


def test_changed_weights_are_seen():
    net, x, _ = trained()

    def radius(net):
        return hf.certify(net, x, answers(net, x), hf.L2(0.01), "centroid").radius

    before = radius(net)
    net.body[0].weight.data *= 1.5
    assert not torch.equal(radius(net), before)
    assert torch.equal(radius(net), radius(copy.deepcopy(net)))
    net.body = nn.Sequential(nn.Linear(3, 4)).eval()
    assert torch.equal(radius(net), radius(copy.deepcopy(net)))


def test_wrong_labels_and_rejections_are_not_certified():
    net, x, y = trained()
    net = with_rejection(net, 0.1)
    label = answers(net, x)
    for may_reject in (False, True):
        result = hf.certify(net, x, (y + 1) % 3, hf.L2(1e-4), "centroid", may_reject=may_reject)
        assert not bool(result.certified[label != (y + 1) % 3].any())
        assert not bool(result.radius[label != (y + 1) % 3].any())
        right = hf.certify(net, x, label, hf.L2(1e-4), "centroid", may_reject=may_reject)
        assert torch.equal(right.certified, right.margin > 0)
        assert bool(right.certified.any())
        assert [bool(name) for name in right.by] == right.certified.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_batch_size_and_chunk(dtype):
    net, x, _ = trained(dtype=dtype)
    net = with_rejection(net, 0.1)
    y = answers(net, x)
    whole = hf.certify(net, x, y, hf.L2(0.01), "centroid")
    pieces = hf.certify(net, x, y, hf.L2(0.01), "centroid", chunk=7)
    one = hf.certify(net, x[:1], y[:1], hf.L2(0.01), "centroid")
    assert whole.radius.dtype == dtype
    assert torch.allclose(whole.radius, pieces.radius, atol=1e-6)
    assert torch.allclose(one.radius, whole.radius[:1], atol=1e-6)
    with pytest.raises(InputError, match="empty batch"):
        hf.certify(net, x[:0], y[:0], hf.L2(0.01), "centroid")


def test_centroids_of_two_classes_in_one_place_prove_nothing():
    net = plain_net(2, 2, 1)
    net.head.weight.data.zero_()
    x = torch.rand(4, 2, dtype=torch.float64)
    assert not bool(hf.certify(net, x, answers(net, x), hf.L2(0.0), "centroid").radius.any())
    rejecting = with_rejection(net, 0.1).eval()
    result = hf.certify(rejecting, x, answers(rejecting, x), hf.L2(0.0), "centroid")
    assert torch.allclose(result.radius, x.norm(dim=1), rtol=1e-6)  # rejected but at the origin


def test_what_it_cannot_prove_it_refuses():
    x, y = torch.rand(3, 3), torch.zeros(3, dtype=torch.long)
    with pytest.raises(UnsupportedError, match=r"needs a holdfast\.models\.CentroidNet, got Linear"):
        hf.certify(nn.Linear(3, 2).eval(), x, y, hf.L2(0.1), "centroid")
    gelu = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match=r"layer 'body\.1': no rule for the layer type GELU"):
        hf.certify(CentroidNet(gelu, Centroid(2, 4)).eval(), x, y, hf.L2(0.1), "centroid")
    net, _, _ = trained(steps=0)
    with pytest.raises(UnsupportedError, match=r"does not handle the threat 'linf:0\.1'"):
        hf.certify(net, x, y, hf.Linf(0.1), "centroid")
    with pytest.raises(UnsupportedError, match="layer 'sub'"):  # the other certificates refuse the distances
        hf.certify(net, x, y, hf.L2(0.1), "crown")
    with pytest.raises(InputError, match="without rejection separates nothing"):
        separation(net, x)
    with pytest.raises(UnsupportedError, match="got Identity"):
        separation(nn.Identity(), x)


def test_all_inputs_rejected_at_eta_one():
    net = with_rejection(plain_net(), 1.0).eval()
    x = torch.randn(20, 2, dtype=torch.float64)
    radius = hf.certify(net, x, answers(net, x), hf.L2(0.01, **WIDE), "centroid").radius
    expected = torch.cdist(x, net.head.weight.detach().flatten(0, 1)).amin(1)
    assert torch.allclose(radius, expected, rtol=1e-5)
    assert math.isfinite(separation(net, x, **WIDE))
