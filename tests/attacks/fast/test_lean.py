"""Lean copies of a network: the gradients of autograd, and answers that never rest on bfloat16."""

import gc
import weakref

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.gradients import input_gradient
from holdfast.attacks.core.losses import cross_entropy, margin
from holdfast.attacks.fast import lean as lean_file
from holdfast.attacks.fast.fold import slimmed
from holdfast.attacks.fast.lean import Lean, lean
from holdfast.errors import InputError, UnsupportedError
from small_models import NAMES, RANDOM, small


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch):
    """Every processor computes in bfloat16, some slowly: the tests do not depend on the machine."""
    for place in (lean_file.__name__, "holdfast.attacks.core.precision"):
        monkeypatch.setattr(f"{place}.has_bfloat16", lambda device: True)


def gradient_by_autograd(model, x, y):
    point = x.clone().requires_grad_(True)
    return torch.autograd.grad(cross_entropy(model(point), y).sum(), point)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_lean_copy_of_every_architecture_has_the_gradients_of_autograd(name):
    model, x = small(name)
    model, x = model.double(), x.double()
    with torch.no_grad():
        logits = model(x)
    copy = slimmed(model, x, logits)
    as_it_is = (*RANDOM, "masked")  # weights that are drawn or computed anew in every pass
    assert (copy is model) == (name in as_it_is)
    if name in as_it_is:
        return
    y = logits.argmax(1)
    expected = gradient_by_autograd(model, x, y)
    found, values, z = input_gradient(Lean(copy), x, y, cross_entropy)
    scale = float(expected.abs().max())
    assert torch.allclose(found, expected, rtol=0, atol=1e-9 * scale)
    assert torch.allclose(z, logits, rtol=0, atol=1e-9 * float(logits.abs().max()))
    assert torch.allclose(values, cross_entropy(logits, y), rtol=0, atol=1e-9)
    with hf.reference():
        assert slimmed(model, x, logits) is model


def make_task(count=12):
    torch.manual_seed(0)
    model = hf.make_model(
        "resnet18", input_shape=(3, 8, 8), classes=4, channels=(8, 8, 8, 8), blocks=(1, 1, 1, 1), seed=0
    )
    x = torch.rand(count, 3, 8, 8)
    with torch.no_grad():
        model.train()(torch.rand(64, 3, 8, 8))
        model.eval()[-1].bias -= model(x).mean(0)
        logits = model(x)
    return model, x, logits.argmax(1), logits


def test_batch_norms_are_gone_and_sums_and_relus_overwrite():
    model, x, _, logits = make_task()
    copy = slimmed(model, x, logits)
    kinds = [type(copy.get_submodule(n.target)) for n in copy.graph.nodes if n.op == "call_module"]
    assert nn.BatchNorm2d not in kinds
    assert nn.ReLU not in kinds
    assert sum(n.op == "call_function" and n.target.__name__ == "iadd" for n in copy.graph.nodes) == 4
    before = x.clone()
    copy(x)
    assert torch.equal(x, before)
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules()), "the model itself stays as it is"


def test_a_value_that_is_used_twice_is_not_overwritten():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.top = nn.Linear(4, 4), nn.Linear(8, 3)

        def forward(self, x):
            z = self.first(x)
            return self.top(torch.cat([z.relu(), z + x], 1))

    torch.manual_seed(0)
    model, x = Twice().eval(), torch.rand(3, 4)
    copy = slimmed(model, x, model(x).detach())
    assert copy is not model
    assert torch.allclose(copy(x), model(x))
    y = torch.zeros(3, dtype=torch.int64)
    assert torch.allclose(gradient_by_autograd(copy, x, y), gradient_by_autograd(model, x, y), atol=1e-6)


def test_gradients_in_bfloat16_point_the_same_way_and_close_logits_are_exact():
    model, x, y, logits = make_task(32)
    quick = lean(model, x, logits, precision="bfloat16")
    assert isinstance(quick, Lean)
    expected = gradient_by_autograd(model, x, y)
    found, _, z = input_gradient(quick, x, y, cross_entropy)
    assert float(torch.cosine_similarity(found.flatten(1), expected.flatten(1)).min()) > 0.95
    assert not torch.equal(found, expected)
    close = margin(z, y) >= -quick.tolerance
    assert torch.allclose(z[close], logits[close], atol=1e-4)
    assert not torch.allclose(z, logits, atol=1e-4)
    wrong = (y + 1) % 4  # every input is misclassified: all of them are decided in full precision
    _, _, z = input_gradient(quick, x, wrong, cross_entropy)
    assert torch.allclose(z, logits, atol=1e-4)
    gradient, _, z = input_gradient(quick, x, y, cross_entropy, full=True)
    assert torch.allclose(gradient, expected, atol=1e-4 * float(expected.abs().max()))


class Liar(nn.Module):
    """Claims one class for every input."""

    def __init__(self, inner, claim):
        super().__init__()
        self.inner, self.claim = inner, claim

    def forward(self, x):
        return self.inner(x) + 100 * torch.eye(4)[self.claim]


@pytest.mark.parametrize("claim", [0, 1, 2, 3])
def test_no_success_rests_on_bfloat16(claim, monkeypatch):
    """Rough logits that are all wrong: every success is real, and the last look still finds successes."""
    model, x, y, logits = make_task()
    full = slimmed(model, x, logits)
    monkeypatch.setattr(
        "holdfast.attacks.core.precision.lean", lambda *_, **__: Lean(full, Liar(full, claim), tolerance=0.1)
    )
    result = hf.attack(model, x, y, hf.Linf(0.05), "pgd", steps=5)
    assert result.precision == "bfloat16"
    assert torch.equal(result.success, model(result.x_adv).argmax(1) != y)
    assert int(result.success.sum()) > 0
    assert int(hf.attack(model, x, y, hf.Linf(0.0), "pgd", steps=5).success.sum()) == 0


@pytest.mark.parametrize("method", ["pgd", "apgd-ce", "fgsm", "fab-t", "square"])
def test_precision_changes_no_verdict_here(method):
    model, x, y, _ = make_task()
    options = {"fgsm": {}, "square": {"queries": 50}, "fab-t": {"steps": 5, "targets": 2}}.get(method, {"steps": 10})
    full, half = (
        hf.attack(model, x, y, hf.Linf(0.01), method, precision=precision, **options)
        for precision in ("full", "bfloat16")
    )
    assert (full.precision, half.precision) == ("full", "full" if method in ("square", "fab-t", "fgsm") else "bfloat16")
    assert int((full.success != half.success).sum()) <= 1
    assert bool((hf.Linf(0.01).contains(half.x_adv, x)).all())
    assert torch.equal(half.success, model(half.x_adv).argmax(1) != y)


class Fragile(nn.Module):
    """Answers that a large constant hides from bfloat16."""

    def __init__(self):
        super().__init__()
        self.top = nn.Linear(12, 3)

    def forward(self, x):
        return self.top((x.flatten(1) + 4096.0) - 4096.0)


def test_a_model_that_bfloat16_breaks_runs_in_full_precision_and_says_so(monkeypatch):
    monkeypatch.setattr(lean_file, "LARGE", 0)
    torch.manual_seed(0)
    model, x = Fragile().eval(), torch.rand(8, 12)
    y = model(x).argmax(1)
    result = hf.attack(model, x, y, hf.Linf(0.1), "pgd", steps=3)
    assert result.precision.startswith("full: the logits in bfloat16 are off by")
    with pytest.raises(UnsupportedError, match="off by"):
        hf.attack(model, x, y, hf.Linf(0.1), "pgd", steps=3, precision="bfloat16")


def test_a_timing_decides(monkeypatch):
    monkeypatch.setattr(lean_file, "LARGE", 0)
    model, x, _, logits = make_task()
    monkeypatch.setattr(lean_file, "_seconds", lambda model, x: 1.0)
    slow = lean(model, x, logits)
    assert slow.rough is None
    assert slow.reason == "bfloat16 takes 1.00 of the time here"
    model, x, _, logits = make_task()  # a timing is kept with its model
    monkeypatch.setattr(lean_file, "_seconds", lambda model, x: 1.0 if isinstance(model, lean_file._Halved) else 2.0)
    assert lean(model, x, logits).rough is not None
    monkeypatch.setattr(lean_file, "has_bfloat16", lambda device: False)
    assert "no kernels" in lean(model, x, logits).reason
    monkeypatch.setattr("holdfast.attacks.core.precision.has_bfloat16", lambda device: False)
    with pytest.raises(UnsupportedError, match="has no bfloat16"):
        hf.attack(model, x, logits.argmax(1), hf.Linf(0.1), "pgd", precision="bfloat16")


def test_unknown_precision_is_refused():
    model, x, y, _ = make_task()
    with pytest.raises(InputError, match=r"unknown precision 'ful'.*full"):
        hf.attack(model, x, y, hf.Linf(0.1), "pgd", precision="ful")


def test_small_networks_and_double_precision_stay_as_they_are():
    model, x, _, logits = make_task()
    assert lean(model, x, logits) is model
    assert lean(model.double(), x.double(), logits.double(), precision="full") is model


def test_a_model_that_cannot_be_traced_gets_autocast():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.top = nn.Linear(12, 3)

        def forward(self, x):
            return self.top(x if x.sum() > 0 else -x)

    torch.manual_seed(0)
    model, x = Branching().eval(), torch.rand(8, 12)
    quick = lean(model, x, model(x).detach(), precision="bfloat16")
    assert quick.full is model
    y = model(x).argmax(1)
    found, _, _ = input_gradient(quick, x, y, cross_entropy)
    assert torch.allclose(found, gradient_by_autograd(model, x, y), atol=0.02)


def test_copies_serve_again_until_the_weights_change():
    model, x, _, logits = make_task()
    first = lean(model, x, logits, precision="full")
    again = lean(model, x, logits, precision="full")
    assert again.full is first.full
    with torch.no_grad():
        model[0].weight.mul_(1.01)
        logits = model(x)
    other = lean(model, x, logits, precision="full")
    assert other.full is not first.full
    assert torch.allclose(other(x), logits, atol=1e-4)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None, "the copies do not keep the model alive"


def test_a_model_without_gradients_keeps_its_form():
    """A trace does not see `no_grad`: the copy would have gradients that the model has not."""

    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(300, 400), nn.Linear(400, 3)

        def forward(self, x):
            with torch.no_grad():
                return self.b(torch.relu(self.a(x)))

    model, x = Silent().eval(), torch.rand(8, 300)
    logits = model(x)
    assert not isinstance(getattr(lean(model, x, logits, precision="full"), "full", model), torch.fx.GraphModule)


class Dense(nn.Module):
    """A network whose own code meets values in bfloat16: what it does to them is for subclasses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(12, 20), nn.Linear(20, 3)

    def forward(self, x):
        return self.b(self.inside(self.a(x.flatten(1))))

    def inside(self, z):
        return z


class Picky(Dense):
    def inside(self, z):
        assert z.dtype == torch.float32
        return z


class _OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        if g.dtype == torch.bfloat16:
            raise KeyError("no kernel")
        return g


class NoWayBack(Dense):
    def inside(self, z):
        return _OneWay.apply(z if bool(z.detach().isfinite().all()) else z.zero_())  # a trace would lose the function


class Turned(Dense):
    """The same values in both precisions, with gradients of the other sign in bfloat16."""

    def inside(self, z):
        return z if z.dtype == torch.float32 else 2 * z.detach() - z


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Picky, "does not run in bfloat16"),
        (NoWayBack, "cosine -1.00"),
        (Turned, "gradients in bfloat16 point elsewhere"),
    ],
)
def test_code_of_the_model_that_bfloat16_breaks_never_weakens_the_attack(kind, reason, monkeypatch):
    monkeypatch.setattr(lean_file, "LARGE", 0)
    monkeypatch.setattr(lean_file, "_ratio", lambda *_: 0.5)
    model, x = kind().eval(), torch.rand(16, 12)
    y = model(x).argmax(1)
    found = hf.attack(model, x, y, hf.Linf(0.05), "pgd", steps=4)
    full = hf.attack(model, x, y, hf.Linf(0.05), "pgd", steps=4, precision="full")
    assert found.precision.startswith("full: ")
    assert reason in found.precision
    assert torch.equal(found.x_adv, full.x_adv)
    with pytest.raises(UnsupportedError, match=reason):
        hf.attack(model, x, y, hf.Linf(0.05), "pgd", steps=4, precision="bfloat16")


def test_a_large_model_without_gradients_is_attacked_without_them(monkeypatch):
    class Silent(Dense):
        def forward(self, x):
            with torch.no_grad():
                return super().forward(x)

    monkeypatch.setattr(lean_file, "LARGE", 0)
    model, x = Silent().eval(), torch.rand(8, 12)
    y = model(x).argmax(1)
    with pytest.raises(InputError, match="has no gradient with respect to its input"):
        hf.attack(model, x, y, hf.Linf(0.1), "pgd", steps=2)
    assert hf.attack(model, x, y, hf.Linf(0.1), "square", queries=20).precision == "full"


def test_gradients_are_compared_once_for_each_copy(monkeypatch):
    model, x, _, logits = make_task()
    calls, gradient = [], lean_file._gradient
    monkeypatch.setattr(lean_file, "_gradient", lambda *given: calls.append(1) or gradient(*given))
    for _ in range(3):
        assert lean(model, x, logits, precision="bfloat16").rough is not None
    assert len(calls) == 2


def test_margins_within_three_errors_of_the_boundary_are_close(monkeypatch):
    model, x, _, logits = make_task()
    monkeypatch.setattr(lean_file, "_error", lambda *_: 1e-4)
    assert lean(model, x, logits, precision="bfloat16").tolerance == pytest.approx(3e-4)
