"""Attributions against closed forms, autodiff and the promises that all of them make."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.errors import InputError, UnsupportedError
from holdfast.explanations import BoundarySearch
from holdfast.explanations.core.baselines import blur
from holdfast.explanations.core.exact_boundary import exact_boundary
from holdfast.explanations.core.paths import completeness_error, nodes_and_weights
from holdfast.explanations.saliency import without_error

OWN = ["saliency", "input-x-gradient", "integrated-gradients", "smoothgrad", "expected-gradients", "agi", "bsm", "big"]
QUICK = {
    "smoothgrad": {"samples": 4},
    "agi": {"classes": 2, "steps": 4},
    "bsm": {"search": BoundarySearch(budgets=(0.5, 4.0), steps=2, starts=1, refine=3, attacks=("deepfool",))},
}
QUICK["big"] = QUICK["bsm"]
ROUGH = {"search": BoundarySearch(budgets=(0.5, 4.0), steps=5, starts=1, refine=2, attacks=())}


def options(name, x):
    more = (
        {"background": torch.rand(7, *x.shape[1:], dtype=x.dtype), "samples": 5} if name == "expected-gradients" else {}
    )
    return ROUGH if name in ("bsm", "big") else QUICK.get(name, {}) | more


def linear(features=6, classes=4):
    return nn.Linear(features, classes).double().eval()


def middle(count, features=6):
    """Points so far from the edge of the range that it plays no part."""
    return 0.4 + 0.2 * torch.rand(count, features, dtype=torch.float64)


def projection(model, x):
    """The nearest boundary point of a linear model, by its formula."""
    z, weight = model(x).detach(), model.weight.detach()
    y = z.argmax(1)
    gap = z.gather(1, y[:, None]) - z
    distance = gap / (weight[y][:, None] - weight).norm(dim=2).clamp(min=1e-30)
    rival = distance.scatter(1, y[:, None], torch.inf).argmin(1)
    w = weight[y] - weight[rival]
    return x - gap.gather(1, rival[:, None]) / w.square().sum(1, keepdim=True) * w


@pytest.mark.parametrize("name", [*OWN, "grad-cam"])
def test_every_method_keeps_the_contract(name):
    model, shape = tiny_nets()["cnn"]
    x = torch.rand(5, *shape)
    y = torch.tensor([0, 1, 2, 3, 4])
    before = copy.deepcopy(model.state_dict())
    result = hf.explain(model, x, y, name, seed=3, **options(name, x))
    assert result.attribution.shape == x.shape
    assert result.attribution.dtype == x.dtype
    assert result.ok.shape == result.error.shape == result.gradients.shape == (5,)
    assert len(result.by) == 5
    assert bool((result.gradients > 0).all())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    # One at a time, and a few points in a pass, give the same answer: random numbers belong to the inputs.
    torch.manual_seed(5)
    more = options(name, x)
    whole = hf.explain(model, x, y, name, seed=3, **more).attribution
    parts = [
        hf.explain(model, x[i : i + 1], y[i : i + 1], name, seed=3, index=torch.tensor([i]), **more) for i in (0, 3)
    ]
    chunked = hf.explain(model, x, y, name, seed=3, chunk=2, **more).attribution
    torch.testing.assert_close(torch.cat([p.attribution for p in parts]), whole[[0, 3]], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(chunked, whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["saliency", "integrated-gradients", "smoothgrad", "big"])
def test_other_dtypes(name, dtype):
    model = linear().to(dtype)
    x = torch.rand(3, 6).to(dtype)
    result = hf.explain(model, x, model(x).argmax(1), name, **QUICK.get(name, {}))
    assert result.attribution.dtype == dtype
    assert bool(torch.isfinite(result.attribution).all())


@given(seed=st.integers(0, 99), quantity=st.sampled_from(["logit", "probability", "margin"]))
@settings(max_examples=10)
def test_saliency_is_the_gradient(seed, quantity):
    torch.manual_seed(seed)
    model, shape = tiny_nets()["smooth"]
    model, x = model.double(), torch.rand(4, *shape, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 2, (4,))
    z = model(x)
    other = z.gather(1, 1 - y[:, None])[:, 0]
    own = z.gather(1, y[:, None])[:, 0]
    wanted = {"logit": own, "probability": torch.sigmoid(own - other), "margin": own - other}[quantity]
    (gradient,) = torch.autograd.grad(wanted.sum(), x)
    found = hf.explain(model, x.detach(), y, "saliency", quantity=quantity)
    torch.testing.assert_close(found.attribution, gradient)
    product = hf.explain(model, x.detach(), y, "input-x-gradient", quantity=quantity)
    torch.testing.assert_close(product.attribution, x.detach() * gradient)


@given(seed=st.integers(0, 99))
@settings(max_examples=4)
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
    found = hf.explain(model, x, y, "big", **QUICK["big"])
    wanted = projection(model, x)
    torch.testing.assert_close(found.boundary, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.attribution, (x - wanted) * w, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.distance, (x - wanted).norm(dim=1), rtol=1e-5, atol=1e-7)
    assert bool((model(found.boundary).argmax(1) != y).all())
    assert bool(found.ok.all())


@pytest.mark.parametrize("rule", ["left", "right", "middle", "trapezoid", "gauss-legendre"])
def test_rules_add_up_to_one_and_are_exact_where_they_should_be(rule):
    t, w = nodes_and_weights(rule, 6)
    assert float(w.sum()) == pytest.approx(1)
    assert bool((t >= 0).all() & (t <= 1).all())
    exact = {"left": 0, "right": 0, "middle": 1, "trapezoid": 1, "gauss-legendre": 11}[rule]
    for power in range(exact + 1):
        assert float((w * t**power).sum()) == pytest.approx(1 / (power + 1), abs=1e-12)


class Square(nn.Module):
    """z = (0, x' Q x)."""

    def __init__(self, q):
        super().__init__()
        self.q = nn.Parameter(q)

    def forward(self, x):
        z = ((x @ self.q) * x).sum(1, keepdim=True)
        return torch.cat([0 * z, z], 1)


@pytest.mark.parametrize(
    ("rule", "places"), [("left", [0, 1, 2, 3]), ("middle", [0.5, 1.5, 2.5, 3.5]), ("right", [1, 2, 3, 4])]
)
def test_where_the_rules_of_equal_weights_look(rule, places):
    t, weights = nodes_and_weights(rule, 4)
    assert (4 * t).tolist() == places
    assert weights.tolist() == [0.25] * 4


def test_the_completeness_error_by_hand():
    """Sums 3, 3 and 5 for values that change by 4, -4 and 0 (of size 10, of which one thousandth counts)."""
    total, at_x, at_b = (torch.tensor(v, dtype=torch.float64) for v in ([3.0, 3, 5], [5.0, 1, 10], [1.0, 5, 10]))
    assert completeness_error(total, at_x, at_b).tolist() == pytest.approx([1 / 4, 7 / 4, 5 / 0.01])


def test_a_quadratic_is_exact_with_the_trapezoid():
    q = torch.randn(4, 4, dtype=torch.float64)
    x, y = torch.rand(3, 4, dtype=torch.float64), torch.ones(3, dtype=torch.long)
    found = hf.explain(Square(q).eval(), x, y, "integrated-gradients", steps=2)
    torch.testing.assert_close(found.attribution, x * (x @ (q + q.T)) / 2)
    assert bool((found.gradients == 2).all())


def test_steps_are_raised_until_the_attribution_is_complete():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    x = torch.rand(20, 8)
    y = model(x).argmax(1)
    for rule in ("left", "trapezoid", "gauss-legendre"):
        rough = hf.explain(model, x, y, "integrated-gradients", rule=rule, steps=3, tolerance=None)
        fine = hf.explain(model, x, y, "integrated-gradients", rule=rule, steps=3)
        assert float(rough.error.max()) > 0.01
        assert bool((fine.error <= 0.01).all() & fine.ok.all())
        assert bool((fine.gradients >= rough.gradients).all())
        total = fine.attribution.sum(1)
        change = (model(x) - model(torch.zeros_like(x))).detach().gather(1, y[:, None])[:, 0]
        assert bool(((total - change).abs() <= 0.0101 * change.abs()).all())
    stuck = hf.explain(model, x, y, "integrated-gradients", rule="left", steps=3, max_steps=3)
    assert torch.equal(stuck.ok, stuck.error <= 0.01)
    assert not bool(stuck.ok.all())
    assert bool((hf.explain(model, x, y, "big", **QUICK["big"]).error <= 0.01).all())


def test_doubled_steps_are_those_of_the_finer_rule():
    model, shape = tiny_nets()["smooth"]
    model, x = model.double(), torch.rand(3, *shape, dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.long)
    for rule, once, twice in (("trapezoid", 3, 5), ("left", 3, 6), ("right", 3, 6)):
        doubled = hf.explain(model, x, y, "integrated-gradients", rule=rule, steps=once, tolerance=1e-15, max_steps=6)
        direct = hf.explain(model, x, y, "integrated-gradients", rule=rule, steps=twice, tolerance=None)
        torch.testing.assert_close(doubled.attribution, direct.attribution)


def test_baselines():
    model, shape = tiny_nets()["cnn"]
    x, y = torch.rand(3, *shape), torch.tensor([0, 1, 2])

    def at(baseline):
        return hf.explain(model, x, y, "integrated-gradients", baseline=baseline, steps=5, tolerance=None).attribution

    torch.testing.assert_close(at("black"), at(torch.zeros(shape)))
    torch.testing.assert_close(at("white"), at(torch.ones_like(x)))
    torch.testing.assert_close(at("blurred"), at(blur(x)))
    assert bool((at(x) == 0).all())
    assert torch.equal(at("random"), at("random"))
    flat = torch.full((1, 1, 6, 9), 0.3)
    torch.testing.assert_close(blur(flat), flat)
    spot = torch.zeros(1, 1, 9, 7)
    spot[0, 0, 4, 3] = 1
    assert blur(spot).argmax() == spot.argmax()
    assert 0 < float(blur(spot).max()) < 1
    with pytest.raises(InputError, match="Did you mean 'black'"):
        at("blak")
    with pytest.raises(InputError, match="the baseline must have the shape of one input"):
        at(torch.zeros(2, 2))
    with pytest.raises(InputError, match="outside the valid range"):
        at(torch.full(shape, 2.0))
    with pytest.raises(InputError, match="'blurred' needs images"):
        hf.explain(
            nn.Linear(2, 2).eval(), torch.rand(1, 2), torch.tensor([0]), "integrated-gradients", baseline="blurred"
        )


def test_smoothgrad_is_the_gradient_of_the_smoothed_neuron():
    """The closed form w Phi(w.x / (sigma |w|)) of one ReLU, and the bound on how fast it can change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False)).double().eval()
    model[2].weight.data = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    w = model[0].weight.detach()[0]
    x = torch.rand(6, 3, dtype=torch.float64)
    y = torch.ones(6, dtype=torch.long)
    previous = math.inf
    for sigma in (0.2, 0.5, 2.0):
        found = hf.explain(model, x, y, "smoothgrad", sigma=sigma, samples=800).attribution
        normal = torch.distributions.Normal(0.0, 1.0)
        wanted = w * normal.cdf(x @ w / (sigma * w.norm()))[:, None]
        assert float((found - wanted).norm(dim=1).max()) < 0.1 * float(w.norm())
        # Theorem: |A(x) - A(x')| <= |w| |x - x'| / (sigma sqrt(2 pi)), which falls as sigma grows.
        rate = float(w.norm()) / (sigma * math.sqrt(2 * math.pi))
        apart = torch.cdist(x, x) + torch.eye(6)
        assert bool((torch.cdist(wanted, wanted) <= rate * apart + 1e-12).all())
        assert rate < previous
        previous = rate


def test_expected_gradients_add_up_and_equal_the_formula_on_linear_models():
    model, x = linear(), middle(4)
    y, background = model(x).argmax(1), torch.rand(30, 6, dtype=torch.float64)
    found = hf.explain(model, x, y, "expected-gradients", background=background, samples=300)
    wanted = (x - background.mean(0)) * model.weight.detach()[y]
    assert float((found.attribution - wanted).abs().max()) < 0.1
    assert float(found.error.max()) < 1e-9
    with pytest.raises(InputError, match="needs background="):
        hf.explain(model, x, y, "expected-gradients")
    with pytest.raises(InputError, match=r"background of shape \(N, 6\)"):
        hf.explain(model, x, y, "expected-gradients", background=torch.rand(3, 5))


def test_agi_adds_up_along_its_paths():
    model, x = linear(), middle(5)
    y = model(x).argmax(1)
    found = hf.explain(model, x, y, "agi")
    assert float(found.error.max()) < 1e-9
    assert "paths that reached another class" in found.by[0]
    net, shape = tiny_nets()["smooth"]
    net[0].weight.data *= 5
    points = torch.rand(5, *shape)
    rough, fine = (
        hf.explain(net, points, net(points).argmax(1), "agi", step_size=size, steps=steps).error
        for size, steps in ((0.05, 10), (0.005, 100))
    )
    assert float(fine.mean()) < 0.2 * float(rough.mean())


def test_agi_by_hand_on_a_linear_model():
    """z = (1, 6 u - v): steps of 0.05 along (+, -) until 6 u - v > 1, each worth -0.05 (6, -1) of z_1's gradient."""
    model = nn.Linear(2, 2).double().eval()
    model.weight.data = torch.tensor([[0.0, 0.0], [6.0, -1.0]], dtype=torch.float64)
    model.bias.data = torch.tensor([1.0, 0.0], dtype=torch.float64)
    x = torch.tensor([[0.2, 0.5]], dtype=torch.float64)  # 0.7: one step adds 0.35
    found = hf.explain(model, x, torch.tensor([0]), "agi", classes=1, step_size=0.05, steps=9, quantity="margin")
    # f = z_0 - z_1 has the gradient (-6, 1); minus the step (0.05, -0.05) times that is (0.3, 0.05).
    torch.testing.assert_close(found.attribution, torch.tensor([[0.3, 0.05]], dtype=torch.float64))


def test_boundary_saliency_is_the_gradient_at_the_boundary_and_not_at_the_input():
    model = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 3)).double().eval()
    model[0].weight.data *= 6
    x = torch.rand(5, 6, dtype=torch.float64)
    y = model(x).argmax(1)
    found = hf.explain(model, x, y, "bsm", **QUICK["bsm"])
    near, here = (p.clone().requires_grad_(True) for p in (found.boundary, x))
    at_boundary, at_x = (torch.autograd.grad(model(p).gather(1, y[:, None]).sum(), p)[0] for p in (near, here))
    torch.testing.assert_close(found.attribution, at_boundary)
    apart = (at_boundary - at_x).norm(dim=1) > 0.1 * at_x.norm(dim=1)
    assert int((apart & found.ok).sum()) >= 3


def test_grad_cam_by_hand():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    model, x = model.eval(), torch.rand(2, 3, 6, 5)
    y = torch.tensor([0, 1])
    a = model[0](x).detach()
    alpha = model[4].weight.detach()[y][:, :, None, None] * (a > 0) / 30
    cam = (alpha.mean((2, 3), keepdim=True) * a).sum(1).clamp(min=0)
    found = hf.explain(model, x, y, "grad-cam", layer="0")
    torch.testing.assert_close(found.attribution.sum(1), cam)
    assert torch.equal(found.attribution, hf.explain(model, x, y, "grad-cam").attribution)
    assert not model[0]._forward_hooks
    with pytest.raises(InputError, match="has no module 'conv'"):
        hf.explain(model, x, y, "grad-cam", layer="conv")
    with pytest.raises(UnsupportedError, match="needs a convolution"):
        hf.explain(nn.Sequential(nn.Flatten(), nn.Linear(90, 2)).eval(), x, y, "grad-cam")


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


def test_the_exact_boundary_is_no_farther_than_any_point_of_a_grid():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    model[0].weight.data *= 4
    side = torch.linspace(0, 1, 201, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    label = model(grid).argmax(1)
    x = torch.rand(6, 2, dtype=torch.float64)
    points, distance = exact_boundary(model, x)
    for one, own, far in zip(x, model(x).argmax(1), distance, strict=True):
        nearest = (
            (grid[label != own] - one).norm(dim=1).amin() if bool((label != own).any()) else torch.tensor(torch.inf)
        )
        assert float(far) <= float(nearest) + 1e-9
        assert float(nearest) <= float(far) + 0.01 or torch.isinf(nearest)
    found = torch.isfinite(distance)
    z = model(points[found]).topk(2, dim=1).values
    torch.testing.assert_close(z[:, 0], z[:, 1])


def test_ok_is_false_exactly_where_a_value_or_a_share_is_not_finite():
    largest = torch.finfo(torch.float32).max
    shares = torch.tensor([[1.0, 2.0], [largest, largest], [torch.inf, -torch.inf], [1.0, torch.nan], [1.0, 1.0]])
    values = torch.tensor([0.0, 0.0, 0.0, 0.0, torch.nan])
    result = without_error(shares, values, None, ("",) * 5, 1)
    assert result.ok.tolist() == [True, True, False, False, False]
    assert without_error(shares[:1], values[:1], None, ("",), 1).ok.tolist() == [True]
    assert bool(result.error.isnan().all())
    assert result.gradients.tolist() == [1] * 5
