"""Models in bfloat16 and float16: attacked and explained as they are, never proved, audited with the reason."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from nets import QUICK_ATTACKS, tiny_nets
from torch import nn

import holdfast as hf
from holdfast.audits import bracket
from holdfast.audits.report import advice
from holdfast.audits.saved import load_audit
from holdfast.certificates import GloRo
from holdfast.certificates.complete.milp import exact_margin
from holdfast.certificates.nonuniform import nonuniform
from holdfast.errors import InputError, UnsupportedError
from holdfast.registry import get

pytestmark = pytest.mark.usefixtures("short_autoattack")

HALVES = [torch.bfloat16, torch.float16]
REFUSAL = r"proofs need float32 or float64, and the model is in b?float16\. .*model\.float\(\)"
THREATS = {"linf": hf.Linf(0.2), "l2": hf.L2(0.6), "l1": hf.L1(1.5), "sparse": hf.Sparse(4), "patch": hf.Patch(3, 3)}


def task(dtype, name="pooled", count=6):
    """A network in the dtype, inputs, and the labels that it gives them."""
    model, shape = tiny_nets()[name]
    model, x = model.to(dtype), torch.rand(count, *shape).to(dtype)
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("method", [entry.name for entry in hf.methods("attack")])
def test_every_attack_runs_in_half_precision(method, dtype):
    for name in ("linear", "pooled"):
        model, x, y = task(dtype, name)
        for threat in THREATS.values():
            pixels = threat.name in ("sparse", "patch")
            # For pixels the cascade only calls the attacks that have their own turn.
            if threat.name not in get("attack", method).threats or (pixels and (x.ndim == 2 or method == "cascade")):
                continue
            found = hf.attack(model, x, y, threat, method, **QUICK_ATTACKS.get(method, {}))
            assert found.x_adv.dtype == dtype
            assert bool(threat.contains(found.x_adv, x).all())
            assert bool((model(found.x_adv).argmax(1) != y)[found.success].all())


@pytest.mark.parametrize("dtype", HALVES)
def test_attacks_break_what_they_break_in_float32(dtype):
    model, x, y = task(dtype, "linear", count=40)
    half = hf.attack(model, x, y, hf.Linf(0.1), "pgd").success
    full = hf.attack(model.float(), x.float(), y, hf.Linf(0.1), "pgd").success
    assert 0 < int(full.sum()) < 40
    assert int((half != full).sum()) <= 2  # on the boundary, the digits decide


PROOFS = {
    "bounds": lambda model, x, y: hf.bounds(model, x, hf.Linf(0.1), "ibp"),
    "unsound bounds": lambda model, x, y: hf.bounds(model, x, hf.Linf(0.1), "crown", sound=False),
    "certify": lambda model, x, y: hf.certify(model, x, y, hf.Linf(0.1)),
    "crown": lambda model, x, y: hf.certify(model, x, y, hf.Linf(0.1), "crown"),
    "gloro": lambda model, x, y: hf.certify(model, x, y, hf.L2(0.1), "gloro"),
    "smoothing": lambda model, x, y: hf.certify(hf.Smoothed(model, 0.1), x, y, hf.L2(0.1), "smoothing"),
    "radius": lambda model, x, y: hf.radius(model, x, y, "linf"),
    "exact margin": lambda model, x, y: exact_margin(model, x[:1], y[:1], hf.Linf(0.1), time_limit=0.1),
    "nonuniform": lambda model, x, y: nonuniform(model, x, y, hf.Linf(0.1)),
    "guard": lambda model, x, y: hf.guard(model, hf.Linf(0.1))(x),
    "GloRo": lambda model, x, y: GloRo(model, hf.L2(0.1)).eval()(x),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("proof", PROOFS)
def test_every_proof_is_refused_with_the_reason(proof, dtype):
    model, x, y = task(dtype)
    with pytest.raises(UnsupportedError, match=REFUSAL):
        PROOFS[proof](model, x, y)
    PROOFS[proof](model.float(), x.float(), y)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_audit_attacks_and_says_why_nothing_is_proved(dtype, tmp_path):
    model, x, y = task(dtype, count=8)
    options = {"budget": "quick", "budgets": 2, "progress": False, "out": tmp_path}
    audit = hf.audit(model, (x.float(), y), hf.Patch(3, 3), **options)
    name = str(dtype).removeprefix("torch.")
    assert audit.headline.endswith(
        f"; no certificate was run: proofs need float32 or float64, and the model is in {name}."
    )
    assert audit.clean == 1
    assert audit.attacked[-1] < 1
    assert audit.certified == (0.0, 0.0)
    (skipped,) = audit.brackets[0].skipped
    assert "model.float()" in skipped
    assert {step["stage"] for step in audit.settings["steps"]} == {"attack"}
    assert "What was not done" in audit.to_html()
    assert skipped in audit.to_html()
    assert any("model.float()" in step.text for step in advice.next_steps(audit))
    # What was stored is what the model saw, and can be read again; a second run finds all of it.
    body = json.loads((tmp_path / "audit.json").read_text())
    schema = Path(bracket.__file__).parent / "report" / "audit.schema.json"
    jsonschema.validate(body, json.loads(schema.read_text()))
    again = load_audit(tmp_path)
    assert again.headline == audit.headline
    broken = [example for example in again.examples if example.x_adv is not None]
    assert broken
    for example in broken:
        x_adv = torch.from_numpy(example.x_adv).to(dtype)
        assert torch.equal(x_adv.float(), torch.from_numpy(example.x_adv).float())
        assert int(model(x_adv[None]).argmax(1)) != int(y[example.position])
        assert example.attribution is not None
    assert hf.audit(model, (x.float(), y), hf.Patch(3, 3), **options).headline == audit.headline


@pytest.mark.parametrize("dtype", HALVES)
def test_no_bracket_of_a_smoothed_model_takes_the_place_of_a_proof(dtype):
    model, x, y = task(dtype)
    options = {"budget": "quick", "budgets": 1, "progress": False}
    both = hf.audit(model, (x, y), [hf.L2(0.3), hf.Linf(0.1)], **options)
    assert len(both.brackets) == 2
    assert "no certificate was run: proofs need float32" in both.headline
    smoothed = hf.audit(hf.Smoothed(model, 0.2, n=8).eval(), (x, y), hf.L2(0.1), **options)
    assert "no certificate was run: proofs need float32" in smoothed.headline


def test_a_certificate_that_is_asked_for_by_name_is_refused_and_none_is_silent():
    model, x, y = task(torch.bfloat16)
    with pytest.raises(UnsupportedError, match=f"{REFUSAL}.*certify=None runs the attacks only"):
        hf.audit(model, (x, y), hf.Linf(0.1), certify="crown", progress=False)
    audit = hf.audit(model, (x, y), hf.Linf(0.1), certify=None, attack="fgsm", budgets=1, progress=False)
    assert "; no certificate was run" in audit.headline
    assert "float32" not in audit.headline
    assert audit.brackets[0].skipped == ()


def test_a_time_limit_is_not_blamed_for_proofs_that_cannot_be():
    model, x, y = task(torch.bfloat16, "linear")
    audit = hf.audit(model, (x, y), hf.Linf(0.01), budget="60s", attack="fgsm", budgets=1, progress=False)
    assert not any("time was not enough" in step.text for step in advice.next_steps(audit))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("method", ["saliency", "smoothgrad", "agi", "bsm", "big", "grad-cam", "integrated-gradients"])
def test_explanations_run_in_half_precision(method, dtype):
    model, x, y = task(dtype, count=3)
    found = hf.explain(model, x, y, method)
    assert found.attribution.dtype == dtype
    assert bool(torch.isfinite(found.attribution).all())
    assert bool((found.attribution != 0).any())


def test_a_layer_without_a_kernel_for_the_dtype_is_said_to_be_one():
    class Missing(nn.Linear):
        def forward(self, x):
            raise NotImplementedError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    model = Missing(3, 2).half().eval()
    with pytest.raises(InputError, match=r"no kernel for torch\.float16 on cpu.*model\.float\(\)"):
        hf.attack(model, torch.rand(2, 3).half(), torch.zeros(2, dtype=torch.long), hf.Linf(0.1), "pgd")
