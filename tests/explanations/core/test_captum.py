"""Against Captum, where it is installed; and what is said where it is not."""

import sys

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.errors import InputError, UnsupportedError
from holdfast.explanations.smoothgrad import noise_blocks
from holdfast.random import Noise

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Captum warns where it sets requires_grad by itself


@pytest.fixture(scope="module")
def attr():
    return pytest.importorskip("captum.attr", exc_type=ImportError)


@pytest.fixture
def task():
    model, shape = tiny_nets()["pooled"]
    x = torch.rand(4, *shape)
    return model, x, torch.tensor([0, 1, 2, 0])


NAMES = {
    "left": "riemann_left",
    "right": "riemann_right",
    "middle": "riemann_middle",
    "gauss-legendre": "gausslegendre",
}


@pytest.mark.parametrize("rule", [*NAMES, "trapezoid"])
def test_integrated_gradients_are_captums(attr, task, rule):
    model, x, y = task
    b = torch.rand_like(x)
    ours = hf.explain(model, x, y, "integrated-gradients", baseline=b, rule=rule, steps=7, tolerance=None).attribution
    tool = attr.IntegratedGradients(model)
    theirs = tool.attribute(x, b, target=y, n_steps=7, method=NAMES.get(rule, "riemann_trapezoid"))
    # The weights of its trapezoid add up to 1 - 1 / steps.
    theirs = theirs * 7 / 6 if rule == "trapezoid" else theirs
    torch.testing.assert_close(ours, theirs.to(ours), rtol=0, atol=1e-5)


def test_saliency_and_smoothgrad_are_captums(attr, task, monkeypatch):
    model, x, y = task
    ours = hf.explain(model, x, y, "saliency").attribution
    torch.testing.assert_close(ours, attr.Saliency(model).attribute(x, target=y, abs=False), rtol=0, atol=1e-5)
    noise = Noise.for_batch(0, 4)
    draws = noise_blocks(noise, slice(0, 1), x)[:, :6].flatten(0, 1)
    monkeypatch.setattr(torch, "normal", lambda mean, deviation: draws * deviation)
    tool = attr.NoiseTunnel(attr.Saliency(model))
    theirs = tool.attribute(x, nt_samples=6, stdevs=0.15, target=y, abs=False)
    ours = hf.explain(model, x, y, "smoothgrad", samples=6).attribution
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_what_comes_from_captum(attr):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(45, 3)).eval()
    x, y = torch.rand(3, 2, 7, 5), torch.tensor([0, 1, 2])
    before = {k: v.clone() for k, v in net.state_dict().items()}
    for name, more in (
        ("deeplift", {}),
        ("lrp", {}),
        ("occlusion", {}),
        ("shapley-sampling", {"samples": 2, "cell": 3}),
    ):
        found = hf.explain(net, x, y, name, **more)
        assert found.attribution.shape == x.shape
        assert bool(found.ok.all())
        if name in ("deeplift", "shapley-sampling"):
            assert float(found.error.max()) < 1e-4
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    linear = nn.Sequential(nn.Flatten(), nn.Linear(70, 3)).eval()
    wanted = linear[1].weight.detach()[y].view_as(x) * x
    for name, more in (("deeplift", {}), ("shapley-sampling", {"samples": 1})):
        torch.testing.assert_close(hf.explain(linear, x, y, name, **more).attribution, wanted, rtol=0, atol=1e-5)
    blots = hf.explain(linear, x, y, "occlusion", window=1).attribution
    torch.testing.assert_close(blots[:, 0], wanted.sum(1), rtol=0, atol=1e-5)
    with pytest.raises(UnsupportedError, match="explains the logit"):
        hf.explain(net, x, y, "lrp", quantity="margin")
    with pytest.raises(UnsupportedError, match="Captum cannot explain"):
        hf.explain(nn.Sequential(nn.Flatten(), nn.Linear(70, 3), nn.Softsign()).eval(), x, y, "lrp")
    for bad in ({"samples": 0}, {"cell": 0}):
        with pytest.raises(InputError):
            hf.explain(net, x, y, "shapley-sampling", **bad)


@pytest.mark.parametrize("name", [m.name for m in hf.methods("explain") if m.package == "captum"])
def test_a_missing_captum_is_named(name, task, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(UnsupportedError, match="pip install captum"):
        hf.explain(*task, name)
