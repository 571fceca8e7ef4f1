"""Attributions against closed forms, autodiff and the promises that all of them make."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from explain_tasks import QUICK_SEARCH, linear, middle
from holdfast.attacks.core import batches
from holdfast.attacks.core.batches import kept_bytes
from holdfast.errors import InputError
from holdfast.explanations import BoundarySearch

OWN = [m.name for m in hf.methods("explain") if not m.package]
QUICK = {
    "smoothgrad": {"samples": 4},
    "agi": {"classes": 2, "steps": 4},
    "bsm": {"search": QUICK_SEARCH},
    "big": {"search": QUICK_SEARCH},
}
ROUGH = {"search": BoundarySearch(budgets=(0.5, 4.0), steps=5, starts=1, refine=2, attacks=())}


def options(name, x):
    more = (
        {"background": torch.rand(7, *x.shape[1:], dtype=x.dtype), "samples": 5} if name == "expected-gradients" else {}
    )
    return ROUGH if name in ("bsm", "big") else QUICK.get(name, {}) | more


def projection(model, x):
    """The nearest boundary point of a linear model, by its formula."""
    z, weight = model(x).detach(), model.weight.detach()
    y = z.argmax(1)
    gap = z.gather(1, y[:, None]) - z
    distance = gap / (weight[y][:, None] - weight).norm(dim=2).clamp(min=1e-30)
    rival = distance.scatter(1, y[:, None], torch.inf).argmin(1)
    w = weight[y] - weight[rival]
    return x - gap.gather(1, rival[:, None]) / w.square().sum(1, keepdim=True) * w


@pytest.mark.parametrize("name", OWN)
def test_the_plain_code_gives_the_same_answer(name):
    model, shape = tiny_nets()["cnn"]
    x, y = torch.rand(3, *shape), torch.tensor([0, 1, 2])
    more = options(name, x)
    fast = hf.explain(model, x, y, name, seed=3, **more)
    with hf.reference():
        plain = hf.explain(model, x, y, name, seed=3, **more)
    torch.testing.assert_close(fast.attribution, plain.attribution, rtol=1e-4, atol=1e-5)
    assert torch.equal(fast.ok, plain.ok)


@pytest.mark.parametrize("name", ["saliency", "integrated-gradients"])
def test_large_inputs_are_explained_in_chunks_that_fit_memory(monkeypatch, name):
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.top, self.sizes = nn.Linear(50, 3), []

        def forward(self, x):
            self.sizes.append(len(x))
            return self.top(x.tanh())

    model, x = Watched().eval(), torch.rand(12, 50)
    y = model(x).argmax(1)
    whole = hf.explain(model, x, y, name)
    assert max(model.sizes) >= 12
    monkeypatch.setattr(batches, "LARGE_INPUT", 50)
    monkeypatch.setattr(batches, "MEMORY", 3 * kept_bytes(model, x[:1]))
    model.sizes.clear()
    parts = hf.explain(model, x, y, name)
    assert sorted(set(model.sizes) - {12})[-1] == 3
    torch.testing.assert_close(parts.attribution, whole.attribution)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["saliency", "integrated-gradients", "smoothgrad", "big"])
def test_other_dtypes(name, dtype):
    model = linear().to(dtype)
    x = torch.rand(3, 6).to(dtype)
    result = hf.explain(model, x, model(x).argmax(1), name, **QUICK.get(name, {}))
    assert result.attribution.dtype == dtype
    assert bool(torch.isfinite(result.attribution).all())


@pytest.mark.parametrize("seed", range(8))  # where the formula, which knows no valid range, stays inside it
def test_closed_forms_on_linear_models(seed):
    torch.manual_seed(seed)
    model, x = linear(), middle(5)
    y = model(x).argmax(1)
    w, b = model.weight.detach()[y], torch.rand(6, dtype=torch.float64)
    for name in ("saliency", "smoothgrad", "bsm"):
        torch.testing.assert_close(hf.explain(model, x, y, name, **QUICK.get(name, {})).attribution, w)
    for rule in ("left", "right", "middle", "trapezoid", "gauss-legendre"):
        found = hf.explain(model, x, y, "integrated-gradients", baseline=b, rule=rule, steps=3)
        torch.testing.assert_close(found.attribution, (x - b) * w)
        torch.testing.assert_close(found.slope, w)
    wanted = projection(model, x)
    found = hf.explain(model, x, y, "big", **QUICK["big"])
    torch.testing.assert_close(found.boundary, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.attribution, (x - wanted) * w, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.distance, (x - wanted).norm(dim=1), rtol=1e-5, atol=1e-7)
    assert bool((model(found.boundary).argmax(1) != y).all())
    assert bool(found.ok.all())


def test_bad_input_is_refused():
    model, x, y = linear(), middle(2), torch.tensor([0, 1])
    with pytest.raises(InputError, match="Did you mean 'big'"):
        hf.explain(model, x, y, "bigg")
    with pytest.raises(InputError, match="Did you mean 'steps'"):
        hf.explain(model, x, y, "big", step=3)
    with pytest.raises(InputError, match="unknown quantity 'logits'"):
        hf.explain(model, x, y, quantity="logits")
    with pytest.raises(InputError, match="empty batch"):
        hf.explain(model, x[:0], y[:0])
    with pytest.raises(InputError, match="label 4 of input 1"):
        hf.explain(model, x, torch.tensor([0, 4]))
    with pytest.raises(InputError, match="label 4 of input 1"):
        hf.explain(model, x, torch.tensor([0, 4]), "saliency")
    with pytest.raises(InputError, match="the model failed on a batch of shape"):
        hf.explain(model, x[:, :3], y, "saliency")
    for name in ("saliency", "big"):
        with pytest.raises(InputError, match="K >= 2"):
            hf.explain(nn.Linear(6, 1).double().eval(), x, 0 * y, name)
    with pytest.raises(InputError, match="training mode"):
        hf.explain(linear().train(), x, y)
    with pytest.raises(InputError, match="chunk must be at least 1"):
        hf.explain(model, x, y, chunk=0)
    with pytest.raises(InputError, match="one entry per input"):
        hf.explain(model, x, y, index=torch.arange(3))
    for name, bad in (
        ("integrated-gradients", {"steps": 0}),
        ("integrated-gradients", {"tolerance": 0.0}),
        ("integrated-gradients", {"rule": "simpson"}),
        ("integrated-gradients", {"rule": "trapezoid", "steps": 1}),
        ("smoothgrad", {"sigma": 0.0}),
        ("agi", {"classes": 0}),
    ):
        with pytest.raises(InputError):
            hf.explain(model, x, y, name, **bad)


def test_an_input_with_infinite_logits_does_not_cost_the_batch():
    class Wild(nn.Module):
        def forward(self, x):
            return torch.stack([1 / (x[:, 0] - 0.5), x[:, 1]], 1)

    x = torch.tensor([[0.2, 0.3], [0.5, 0.5], [0.1, 0.9]])
    y = torch.zeros(3, dtype=torch.long)
    for name in ("saliency", "input-x-gradient"):
        assert hf.explain(Wild().eval(), x, y, name).ok.tolist() == [True, False, True]
    assert not bool(hf.explain(Wild().eval(), x, y, "integrated-gradients").ok[1])
