"""Every certificate meets every attack: what is certified is never broken. The bracket holds on every batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import QUICK, QUICK_ATTACKS, tiny_nets
from torch import nn

import holdfast as hf
from holdfast.models import Centroid, CentroidNet
from holdfast.models.layers import MinMax
from holdfast.random import Noise

BUDGETS = {
    "linf": [0.002, 0.01, 0.05],
    "l2": [0.005, 0.03, 0.1],
    "l1": [0.01, 0.05, 0.2],
}
PATCH_CERTIFICATES = [m.name for m in hf.methods("certify") if "patch" in m.threats and not m.smoothed]
COMPOSED = {"autoattack", "cascade"}
"""These call attacks that meet every certificate themselves."""
KINDS = {"linf": hf.Linf, "l2": hf.L2, "l1": hf.L1}


def broken_by_anything(model, x, y, threat, seed=0):
    """(B,) bool: did any attack that handles the threat, or any of some random points, break the input?"""
    broken = torch.zeros(len(x), dtype=torch.bool)
    for entry in hf.methods("attack"):
        if threat.name in entry.threats and entry.name not in COMPOSED:
            broken |= hf.attack(model, x, y, threat, entry.name, seed=seed, **QUICK_ATTACKS[entry.name]).success
    for draw in range(10):
        point = threat.random_start(x, Noise.for_batch(draw, len(x)))
        broken |= model(point).argmax(1) != y
    return broken


def check(model, x, y, threat, seed=0):
    """What any certificate proves, nothing may break. Returns what each of them proved."""
    broken = broken_by_anything(model, x, y, threat, seed)
    proved = {}
    for entry in hf.methods("certify"):
        # What speaks of a smoothed classifier is met by attacks on that one, in tests/certificates.
        if threat.name in entry.threats and not entry.smoothed:
            try:
                options = QUICK[entry.name]
                proved[entry.name] = hf.certify(model, x, y, threat, entry.name, **options).certified
            except hf.UnsupportedError:  # a layer that this certificate has no rule for; refusing is right
                continue
            assert not bool((proved[entry.name] & broken).any()), (entry.name, str(threat))
    return proved


@pytest.mark.parametrize("kind", BUDGETS)
def test_no_attack_breaks_a_certificate(net, kind):
    model, shape = net
    x = torch.rand(16, *shape)
    y = model(x).argmax(1)
    proved = [check(model, x, y, KINDS[kind](eps)) for eps in BUDGETS[kind]]
    for name, certified in proved[0].items():
        assert bool(certified.any()), f"{name} should prove something at the smallest budget, or the test says nothing"
        assert certified.sum() >= proved[-1][name].sum()


@pytest.mark.parametrize("eta", [None, 0.2])
def test_no_attack_breaks_the_certificate_of_a_centroid_network(eta):
    """It refuses the networks of the other tests, and needs one of its own."""
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(6, 16), MinMax(), nn.Linear(16, 4))
    model = CentroidNet(body, Centroid(3, 4, per_class=2), eta=eta).eval()
    x = torch.rand(24, 6)
    with torch.no_grad():
        features = body(x)
        model.head.weight.copy_(features[:6].view(3, 2, 4))  # answers of all classes, and close calls
    y = model(x).argmax(1)
    assert len(y.unique()) == (3 if eta is None else 4)
    proved = hf.certify(model, x, y, hf.L2(0.1), "centroid").certified
    broken = broken_by_anything(model, x, y, hf.L2(0.1))
    assert bool(proved.any())
    assert bool(broken.any())
    assert not bool((proved & broken).any())


@pytest.mark.parametrize("certificate", PATCH_CERTIFICATES)
def test_no_patch_breaks_a_certificate(certificate):
    model, shape = tiny_nets()["pooled"]
    with torch.no_grad():
        model[-1].bias[1] += 2.0  # a preferred class, so that there is something to prove
    x = torch.rand(30, *shape)
    y = model(x).argmax(1)
    proof = hf.certify(model, x, y, hf.Patch(2, 2), certificate, **QUICK[certificate]).certified
    assert bool(proof.any())
    assert not bool((proof & broken_by_anything(model, x, y, hf.Patch(2, 2))).any())
    for draw in range(200):
        point = hf.Patch(2, 2).random_start(x, Noise.for_batch(draw, len(x)))
        point = point.round() if draw % 2 else point
        patched = torch.where(point == x, x, point)
        assert not bool((proof & (model(patched).argmax(1) != y)).any())


def test_no_change_of_pixels_breaks_a_sparse_certificate():
    model, shape = tiny_nets()["pooled"]
    with torch.no_grad():
        model[-1].bias[1] += 2.0
    x = torch.rand(30, *shape)
    y = model(x).argmax(1)
    broken = broken_by_anything(model, x, y, hf.Sparse(2))
    for entry in hf.methods("certify"):
        if "sparse" not in entry.threats or entry.smoothed:
            continue
        proof = hf.certify(model, x, y, hf.Sparse(2), entry.name, **QUICK[entry.name]).certified
        assert bool(proof.any()), entry.name
        assert not bool((proof & broken).any()), entry.name
        for draw in range(200):
            point = hf.Sparse(2).random_start(x, Noise.for_batch(draw, len(x)))
            changed = torch.where(point == x, x, point.round() if draw % 2 else point)
            assert not bool((proof & (model(changed).argmax(1) != y)).any()), entry.name


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("name", ["linear", "mlp", "pooled"])
def test_no_misclassified_point_lies_below_the_certified_radius(name, norm):
    model, shape = tiny_nets()[name]
    x = torch.rand(12, *shape)
    y = model(x).argmax(1)
    distance = hf.nearest(model, x, y, norm, steps=10, targets=2, polish=10).distance
    assert bool(torch.isfinite(distance).any())
    for method in ("pec", "crown", "ibp"):
        proved = hf.radius(model, x, y, norm, method, tolerance=1e-3)
        assert bool((proved > 0).any())
        assert bool((proved <= distance).all()), method


@pytest.mark.parametrize("recipe", ["standard", "at"])
def test_trained_networks(recipe):
    """The same on a network that has learnt something, where margins are large and few neurons are unstable."""
    data = hf.load_data("two-moons", n=400, noise=0.15)
    parts = {"attack": {"name": "pgd", "steps": 5}} if recipe == "at" else {}
    result = hf.train(
        {
            "model": {"name": "mlp", "hidden": [24, 24]},
            "threat": "linf:0.03",
            "epochs": 15,
            "batch_size": 50,
            "objective": {"name": recipe},
            **parts,
            "optimizer": {"name": "adam", "lr": 0.01},
        },
        data=data,
        progress=False,
    )
    x, y = data.test.x[:60], data.test.y[:60]
    assert (result.model(x).argmax(1) == y).float().mean() > 0.8
    for threat in (hf.Linf(0.02), hf.Linf(0.06), hf.L2(0.05), hf.L1(0.05), hf.Sparse(1)):
        proved = check(result.model, x, y, threat)
        if threat.budget < 1 and recipe == "at" and threat.budget <= 0.02:
            assert int(proved["crown"].sum()) > 30


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.sampled_from([nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardtanh]),
    st.integers(2, 4),
    st.integers(0, 10_000),
    st.sampled_from([0.003, 0.02, 0.1]),
)
@settings(max_examples=10)
def test_generated_networks(widths, activation, classes, seed, eps):
    torch.manual_seed(seed)
    layers, size = [], 5
    for width in widths:
        layers += [nn.Linear(size, width), activation()]
        size = width
    model = nn.Sequential(*layers, nn.Linear(size, classes)).eval()
    x = torch.rand(8, 5)
    check(model, x, model(x).argmax(1), hf.Linf(eps), seed)


@pytest.mark.parametrize("objective", ["ibp", "slope-step", "per"])
def test_networks_trained_for_certificates_keep_them(objective):
    """Few examples and a short run: enough that most inputs are certified, and that attacks have a trained model."""
    data = hf.load_data("mnist-mini")
    few = hf.Dataset("few", data.train[:600], data.test[:40], data.classes)
    recipe = {
        "threat": "linf:0.05",
        "epochs": 5,
        "batch_size": 50,
        "validation": 0.0,
        "weights": "ibp",
        "model": {"name": "mlp", "hidden": [32]},
        "objective": {"name": objective},
        "optimizer": {"name": "adam", "lr": 5e-3},
        "budget": {"name": "linear", "end": 3},
        "evaluate": {"attack_steps": 0},
    }
    model = hf.train(recipe, data=few, progress=False).model
    x, y = few.test.x, few.test.y
    proved = check(model, x, y, hf.Linf(0.05))
    assert proved["auto"].double().mean() > 0.3
    assert bool((proved["auto"] | ~proved["ibp"]).all())
