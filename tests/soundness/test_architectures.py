"""Every architecture of the catalogue, made small: it has bounds, or the layer that has none is named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import QUICK
from torch import nn

import holdfast as hf
from dags import SHAPE, random_dag
from holdfast.random import Noise
from small_models import NAMES, RANDOM, small

WITHOUT_RULE = {"centroid": "broadcasting", "ensemble": "log_softmax", "hybrid-l16": "GroupNorm"}
WITHOUT_RULE |= {name: "transpose" for name in NAMES if name.startswith("vit")}


def inside(model, x, threat, bounds):
    for draw in range(10):
        point = threat.random_start(x, Noise.for_batch(draw, len(x)))
        for logits in (model(point), model(threat.project(x + 50 * (point - x), x))):
            assert bool((bounds.lower <= logits).all())
            assert bool((logits <= bounds.upper).all())


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_has_bounds_or_names_the_layer_that_has_none(name):
    model, x = small(name)
    if name in RANDOM:
        with pytest.raises(hf.HoldfastError, match="random"):
            hf.bounds(model, x, hf.Linf(0.01), "ibp")
        return
    if name in WITHOUT_RULE:
        with pytest.raises(hf.UnsupportedError, match=f"layer '.*({WITHOUT_RULE[name]})"):
            hf.bounds(model, x, hf.Linf(0.01), "ibp")
        return
    for threat in (hf.Linf(0.02), hf.L2(0.05)):
        # Backward passes for every layer of a large image would take seconds.
        bounds = hf.bounds(model, x, threat, "crown-ibp" if x[0].numel() > 2000 else "crown")
        inside(model, x, threat, bounds)
        assert bool((bounds.upper > bounds.lower).all())


ONE_OF_EACH = [
    "2c2f-minmax",
    "4c3f",
    "cnn-aol",
    "cnn-cpl",
    "fc1",
    "linear",
    "liresnet",
    "preact-resnet18",
    "resnet-wong",
]
ONE_OF_EACH += ["resnet18", "resnet50", "rn34", "cnn-sll"]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_method_takes_every_family_of_architectures(name):
    model, x = small(name)
    y = model(x).argmax(1)
    for threat in (hf.Linf(0.002), hf.L2(0.01)):
        broken = [model(threat.random_start(x, Noise.for_batch(d, len(x)))).argmax(1) != y for d in range(10)]
        for kind in ("bounds", "certify"):
            for method in hf.methods(kind):
                if (
                    threat.name not in method.threats
                    or getattr(method, "smoothed", False)
                    or method.name in ("centroid", "nonuniform")
                ):
                    continue
                options = QUICK.get(method.name, {}) | ({"time_limit": 0.3} if method.name == "milp" else {})
                try:
                    if kind == "bounds":
                        inside(model, x, threat, hf.bounds(model, x, threat, method.name, **options))
                    else:
                        proved = hf.certify(model, x, y, threat, method.name, **options).certified
                        assert not bool((proved & torch.stack(broken).any(0)).any()), method.name
                except hf.UnsupportedError:
                    if method.name != "cap":  # which covers chains of affine layers and ReLUs
                        raise
    audit = hf.audit(model, (x, y), hf.Linf(0.002), budgets=1, budget="quick", progress=False)
    assert audit.clean == 1
    assert audit.certified[0] <= audit.attacked[0]


@torch.no_grad()
@settings(max_examples=6)
@given(st.integers(0, 10_000), st.sampled_from([hf.Linf(0.02), hf.L2(0.05), hf.L1(0.1), hf.Sparse(1), hf.Patch(1, 2)]))
def test_no_certificate_exceeds_a_margin_of_random_branches(seed, threat):
    model = random_dag(seed, (nn.ReLU, nn.LeakyReLU))
    x = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(seed))
    y = model(x).argmax(1)
    logits = torch.stack([model(threat.random_start(x, Noise.for_batch(draw, len(x)))) for draw in range(20)])
    label = y.expand(len(logits), -1)[..., None]
    margin = (logits.gather(2, label) - logits).scatter(2, label, torch.inf).amin((0, 2))
    used = set()
    for method in hf.methods("certify"):
        if threat.name in method.threats and not method.smoothed and method.name not in ("cap", "centroid"):
            options = QUICK.get(method.name, {}) | ({"time_limit": 0.5} if method.name == "milp" else {})
            found = hf.certify(model, x, y, threat, method.name, **options)
            assert not bool((found.certified & (margin <= 0)).any()), method.name
            if method.name not in ("gloro", "lipschitz"):  # whose margin is a bound at x
                assert bool((found.margin <= margin).all()), method.name
            used.add(method.name)
    assert {"ibp", "crown", "fastlin", "alpha-crown", "auto"} <= used
