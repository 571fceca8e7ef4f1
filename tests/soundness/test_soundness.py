"""Every certificate meets every attack: what is certified is never broken. The bracket holds on every batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.random import Noise

BUDGETS = {
    "linf": [0.002, 0.01, 0.05],
    "l2": [0.005, 0.03, 0.1],
    "l1": [0.01, 0.05, 0.2],
}
CERTIFICATES = [m.name for m in hf.methods("certify")]
KINDS = {"linf": hf.Linf, "l2": hf.L2, "l1": hf.L1}


def broken_by_anything(model, x, y, threat, seed=0):
    """(B,) bool: did any attack that handles the threat, or any of some random points, break the input?"""
    broken = torch.zeros(len(x), dtype=torch.bool)
    for entry in hf.methods("attack"):
        if threat.name in entry.threats:
            broken |= hf.attack(model, x, y, threat, entry.name, seed=seed).success
    for draw in range(10):
        point = threat.random_start(x, Noise.for_batch(draw, len(x)))
        broken |= model(point).argmax(1) != y
    return broken


def check(model, x, y, threat, seed=0):
    """What any certificate proves, nothing may break. Returns what each of them proved."""
    broken = broken_by_anything(model, x, y, threat, seed)
    proved = {}
    for entry in hf.methods("certify"):
        if threat.name in entry.threats:
            try:
                proved[entry.name] = hf.certify(model, x, y, threat, entry.name).certified
            except hf.UnsupportedError:  # an activation without a linear relaxation; refusing is right
                continue
            assert not bool((proved[entry.name] & broken).any()), (entry.name, str(threat))
    return proved


@pytest.mark.parametrize("kind", BUDGETS)
def test_no_attack_breaks_a_certificate(net, kind):
    model, shape = net
    x = torch.rand(24, *shape)
    y = model(x).argmax(1)
    proved = [check(model, x, y, KINDS[kind](eps)) for eps in BUDGETS[kind]]
    for name, certified in proved[0].items():
        assert bool(certified.any()), f"{name} should prove something at the smallest budget, or the test says nothing"
        assert certified.sum() >= proved[-1][name].sum()


@pytest.mark.parametrize("certificate", CERTIFICATES)
def test_no_random_patch_breaks_a_certificate(certificate):
    model, shape = tiny_nets()["pooled"]
    with torch.no_grad():
        model[-1].bias[1] += 2.0  # a preferred class, so that there is something to prove
    x = torch.rand(30, *shape)
    y = model(x).argmax(1)
    proof = hf.certify(model, x, y, hf.Patch(2, 2), certificate).certified
    assert bool(proof.any())
    for draw in range(200):
        point = hf.Patch(2, 2).random_start(x, Noise.for_batch(draw, len(x)))
        point = point.round() if draw % 2 else point
        patched = torch.where(point == x, x, point)
        assert not bool((proof & (model(patched).argmax(1) != y)).any())


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.sampled_from([nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardtanh]),
    st.integers(2, 4),
    st.integers(0, 10_000),
    st.sampled_from([0.003, 0.02, 0.1]),
)
@settings(max_examples=40)
def test_generated_networks(widths, activation, classes, seed, eps):
    torch.manual_seed(seed)
    layers, size = [], 5
    for width in widths:
        layers += [nn.Linear(size, width), activation()]
        size = width
    model = nn.Sequential(*layers, nn.Linear(size, classes)).eval()
    x = torch.rand(8, 5)
    check(model, x, model(x).argmax(1), hf.Linf(eps), seed)
