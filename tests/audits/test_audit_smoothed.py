"""An audit of a smoothed classifier: one sample for all budgets, attacks on what the certificate speaks of."""

import json

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.audits import task as tasks
from holdfast.errors import InputError, SoundnessError, UnsupportedError


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2)).eval()
    smoothed = hf.Smoothed(model, 0.15, n=50).eval()
    x = torch.rand(16, 3)
    return smoothed, x, smoothed(x).argmax(1)


OPTIONS = {
    "budgets": 3,
    "attack": "pgd",
    "attack_options": {"steps": 4},
    "certify": "smoothing",
    "certify_options": {"n": 2000},
    "progress": False,
}


def test_the_bracket_holds_and_names_its_alpha(task, tmp_path):
    smoothed, x, y = task
    result = hf.audit(smoothed, (x, y), hf.L2(0.3), out=tmp_path / "run", **OPTIONS)
    assert result.certified[0] > 0
    assert all(low <= high for low, high in zip(result.certified, result.attacked, strict=True))
    assert result.certified == tuple(sorted(result.certified, reverse=True))
    assert result.settings["alpha"] == 0.001
    assert "wrong with probability 0.001" in str(result.table().renderables[0].caption)
    assert result.trust == ()
    direct = hf.certify(smoothed, x, y, hf.L2(0.3), "smoothing", n=2000, radii=[0.1, 0.2]).radius
    for level, budget in zip(result.levels[1:], result.budgets, strict=True):
        assert level.certified == int((direct > budget).sum())
    again = hf.audit(smoothed, (x, y), hf.L2(0.3), out=tmp_path / "run", **OPTIONS)
    assert again.records == result.records
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["settings"]["alpha"] == 0.001


def test_the_batch_does_not_change_what_is_proved(task):
    smoothed, x, y = task
    small, large = (hf.audit(smoothed, (x, y), hf.L2(0.3), batch_size=b, **OPTIONS) for b in (5, 16))
    assert [r.certified for r in small.records] == [r.certified for r in large.records]


def test_a_plain_model_is_refused_and_the_way_out_is_named(task):
    smoothed, x, y = task
    with pytest.raises(InputError, match=r"audit hf.Smoothed\(model, sigma\)"):
        hf.audit(smoothed.model, (x, y), hf.L2(0.3), certify="smoothing", certify_options={"sigma": 0.1})
    with pytest.raises(UnsupportedError, match="handles"):
        hf.audit(smoothed, (x, y), hf.Linf(0.3), progress=False)


def test_a_broken_proof_is_an_error_that_says_how_likely_it_is(task, monkeypatch):
    smoothed, x, y = task
    honest = tasks.run_certify

    def liar(*args, **options):
        result = honest(*args, **options)
        return hf.CertifyResult(result.certified, result.margin, torch.ones_like(result.margin), result.alpha)

    monkeypatch.setattr(tasks, "run_certify", liar)
    with pytest.raises(SoundnessError, match=r"wrong with probability 0.001; if you see it twice"):
        hf.audit(smoothed, (x, y), hf.L2(0.9), **OPTIONS)
