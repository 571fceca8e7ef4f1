"""Every registered certificate and bound meets the rounding oracle: networks that fail by a hair."""

import math

import mpmath
import pytest
import torch
from nets import QUICK
from torch import nn

import holdfast as hf
from holdfast.errors import InputError
from holdfast.models import Centroid, CentroidNet
from holdfast.registry import get
from holdfast.testing import check_bounds, check_certificate
from holdfast.testing.bounds_suite import CHAIN
from holdfast.testing.certificate_suite import Claim, falsely_proved
from holdfast.testing.subject import threats_for
from holdfast.testing.traps import CENTRE, RADIUS, THREATS, exact, traps

DTYPES = [torch.float32, torch.float64]
PROOFS = [m for m in hf.methods("certify") if m.guarantee == "proof" and not m.smoothed and not m.needs]


def one_threat(kind, method, threat):
    return [found for found in threats_for(get(kind, method), CHAIN, scale=0.1) if found.name == threat]


def test_there_are_traps_of_every_kind():
    for dtype in DTYPES:
        assert len(traps(dtype)) > 100
        assert sum("1e+-0" not in one.name for one in traps(dtype)) > 60
        for one in traps(dtype):
            assert one.model(one.x).argmax(1).item() == 0
            logits = one.model(one.bad)[0]
            assert logits[0] <= logits[1] or exact(one.model, one.bad.item())[0] <= exact(one.model, one.bad.item())[1]


def claim(method, threat):
    """The certificate under test as the suite sees it."""
    return Claim(method, THREATS[threat], QUICK[method.name])


@pytest.mark.parametrize(
    ("method", "threat"), [(m.name, threat) for m in hf.methods("certify") for threat in m.threats]
)
def test_no_certificate_proves_a_network_that_fails_by_a_hair(method, threat):
    """The whole contract of a certificate; `needs` says which networks it meets."""
    check_certificate(method, threats=one_threat("certify", method, threat))


@pytest.mark.parametrize(
    "method", [m for m in PROOFS if "sound" in m.options and m.name != "lipschitz"], ids=lambda m: m.name
)
def test_the_oracle_catches_certificates_that_ignore_rounding(method):
    """Without the rounding-error term each proves some of them, or the oracle would say nothing.

    `lipschitz` proves none: sqrt(2) stands between it and a difference of two logits.
    """
    threat = next(name for name in ("linf", "l2", "patch", "sparse") if name in method.threats)
    found, wrong = traps(torch.float32), []
    for start in range(12):  # until it is sure
        wrong += falsely_proved(claim(method, threat), found[start::12], sound=False)[0]
        if len(wrong) >= 3:
            return
    pytest.fail(f"only {wrong}")


@pytest.mark.parametrize(("method", "threat"), [(m.name, threat) for m in hf.methods("bounds") for threat in m.threats])
def test_bounds_hold_for_the_network_as_run_and_in_rational_arithmetic(method, threat):
    check_bounds(method, threats=one_threat("bounds", method, threat))


def centroid_trap(scale, dtype):
    """A centroid network on one value, with one feature that moves, that leaves class 0 just inside the ball."""
    body = nn.Sequential(nn.Linear(1, 2, dtype=dtype))
    body[0].weight.data = torch.tensor([[scale], [0.0]], dtype=dtype)
    body[0].bias.data = torch.tensor([0.3 * scale, 0.0], dtype=dtype)
    model = CentroidNet(body, Centroid(2, 2).to(dtype)).eval()
    x, bad = torch.full((1, 1), CENTRE, dtype=dtype), torch.full((1, 1), CENTRE + RADIUS, dtype=dtype)
    near, far = body(x)[0, 0].item(), 3 * body(bad)[0, 0].item()

    def put(place):
        with torch.no_grad():
            model.head.weight.copy_(torch.tensor([[[near, 0.0]], [[place, 0.0]]], dtype=dtype))

    low = near
    for _ in range(100):  # the farthest centroid of class 1 that still takes the end of the interval
        middle = (low + far) / 2
        put(middle)
        low, far = (middle, far) if model(bad).argmax(1).item() == 1 else (low, middle)
    put(low)
    return model, x, bad


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_centroid_certificate_proves_a_network_that_fails_by_a_hair(dtype):
    met = 0
    for power in range(-30, 31, 3):
        model, x, bad = centroid_trap(10.0**power, dtype)
        if model(bad).argmax(1).item() == 0 or model(x).argmax(1).item() == 1:
            continue
        met += 1
        y = torch.zeros(1, dtype=torch.long)
        assert not bool(hf.certify(model, x, y, hf.L2(RADIUS), "centroid").certified), power
    assert met > 10


class Constant(nn.Module):
    """Answers class 0 whatever it sees: all samples agree, so the confidence bound has a closed form."""

    def __init__(self, dtype):
        super().__init__()
        self.head = nn.Parameter(torch.tensor([1.0, 0.0], dtype=dtype))

    def forward(self, x):
        return self.head.expand(len(x), 2) + 0 * x.flatten(1)[:, :1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "alpha"), [(100, 0.001), (1000, 0.001), (777, 0.05), (64, 1e-6)])
def test_radii_of_smoothed_classifiers_are_rounded_down(n, alpha, dtype):
    """All n samples agree, so P >= alpha^(1/n), exactly; Gaussian and uniform noise have closed forms of the radius."""
    model, x, y = Constant(dtype).eval(), torch.rand(2, 1, 3, 3, dtype=dtype), torch.zeros(2, dtype=torch.long)
    options = {"n": n, "n0": 10, "alpha": alpha, "adaptive": False}
    with mpmath.workdps(60):
        least = mpmath.mpf(alpha) ** (mpmath.mpf(1) / n)
        truths = {
            "smoothing": mpmath.mpf(0.3) * mpmath.sqrt(2) * mpmath.erfinv(2 * least - 1),
            "smoothing-l1": 2 * mpmath.mpf(0.7) * (least - mpmath.mpf(1) / 2),
        }
        for name, threat, extra in (
            ("smoothing", hf.L2(0.01), {"sigma": 0.3}),
            ("smoothing-l1", hf.L1(0.01), {"scale": 0.7}),
        ):
            radius = hf.certify(model, x, y, threat, name, **options, **extra).radius
            assert all(mpmath.mpf(r) <= truths[name] for r in radius.tolist()), name
            assert all(mpmath.mpf(r) >= truths[name] * (1 - mpmath.mpf(1e-5)) for r in radius.tolist()), name


def test_the_number_of_pixels_of_a_smoothed_classifier_is_exact():
    """Ablation to k of d pixels: certified iff alpha^(1/n) - (1 - C(d - rho, k) / C(d, k)) > 1/2, in rationals."""
    model, x, y = Constant(torch.float32).eval(), torch.rand(1, 1, 5, 5), torch.zeros(1, dtype=torch.long)
    n, alpha = 200, 0.001
    with mpmath.workdps(60):
        least = mpmath.mpf(alpha) ** (mpmath.mpf(1) / n)
        for size in (2, 3, 5):
            for rho in range(1, 8):
                unseen = mpmath.mpf(math.comb(25 - rho, size)) / math.comb(25, size)
                proved = least - (1 - unseen) > mpmath.mpf(1) / 2
                options = {"size": size, "n": n, "n0": 10, "alpha": alpha, "adaptive": False}
                if not proved:
                    with pytest.raises(InputError, match=r"cannot prove|out of reach"):  # before a sample is drawn
                        hf.certify(model, x, y, hf.Sparse(rho), "smoothing-l0", **options)
                else:
                    assert bool(hf.certify(model, x, y, hf.Sparse(rho), "smoothing-l0", **options).certified)


def test_every_certificate_is_met():
    """A certificate that the oracle cannot meet is met by networks or a closed form of its own, in this file."""
    assert {m.needs for m in hf.methods("certify")} == {"", "centroid"}
    assert {m.name for m in hf.methods("certify") if m.smoothed} == {
        "smoothing",
        "smoothing-l1",
        "smoothing-l0",
        "smoothing-patch",  # counts of votes: integers, nothing is rounded
    }
