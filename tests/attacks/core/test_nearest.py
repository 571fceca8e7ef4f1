"""The front door to minimum-norm attacks, and what holds for all of them."""

from itertools import pairwise

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.hyperplane import move_to_hyperplane
from holdfast.attacks.core.minimum_norm import BALLS, Nearest, Search, line_search, norm_of
from holdfast.attacks.core.nearest import nearest, nearest_methods
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.registry import get

QUICK = {
    "auto": {"steps": 10, "targets": 2, "polish": 10},
    "fab": {"steps": 10},
    "fab-t": {"steps": 10, "restarts": 2, "targets": 2},
    "deepfool": {"steps": 20},
    "cw": {"steps": 15, "rounds": 5, "c": 0.1},
    "fmn": {"steps": 20},
    "ddn": {"steps": 20, "epsilon": 0.5, "gamma": 0.1},
}
NORMS = {"deepfool": ("linf", "l2"), "cw": ("linf", "l2"), "ddn": ("l2",)}
PAIRS = [(method, norm) for method in nearest_methods() for norm in NORMS.get(method, ("linf", "l2", "l1"))]
ATTACKS = [(method, norm) for method, norm in PAIRS if method != "auto"]
BUDGET = {"linf": 0.1, "l2": 0.4, "l1": 1.5}


def task(batch=9, name="cnn", dtype=torch.float64):
    model, shape = tiny_nets()[name]
    model = model.to(dtype)
    x = torch.rand(batch, *shape, dtype=dtype, generator=torch.Generator().manual_seed(5))
    model[-1].bias.data -= model(x).detach().mean(0)  # all classes within reach
    return model, x, model(x).argmax(1).detach()


def exact(model, x, y, norm, low=0.0, high=1.0):
    """Distance of a linear model's nearest boundary inside the range, (B,)."""
    best = torch.full((len(x),), torch.inf, dtype=x.dtype)
    for j in range(len(model.bias)):
        w = (model.weight[j] - model.weight[y]).detach()
        b = (model.bias[y] - model.bias[j]).detach()
        d = move_to_hyperplane(x, w, b, norm, low, high)
        reached = ((w * (x + d)).sum(1) - b).abs() < 1e-9
        distance = torch.where(reached & (y != j), norm_of(d, norm), torch.inf)
        best = torch.minimum(best, distance)
    return best


@pytest.mark.parametrize(("method", "norm"), PAIRS)
def test_results_are_what_they_claim(method, norm):
    model, x, y = task()
    y[0] = (y[0] + 1) % 5  # one input that is wrong to begin with
    result = nearest(model, x, y, norm, method, **QUICK[method])
    assert isinstance(result, Nearest)
    found = torch.isfinite(result.distance)
    assert int(found.sum()) > 5
    assert bool((model(result.x_adv).argmax(1) != y)[found].all())
    assert torch.equal(norm_of(result.x_adv - x, norm)[found], result.distance[found])
    assert torch.equal(result.x_adv[~found], x[~found])
    assert bool(((result.x_adv >= 0) & (result.x_adv <= 1)).all())
    assert result.by[0] == "clean"
    assert float(result.distance[0]) == 0
    assert int(result.gradients[0]) == 0 or method in ("fmn", "ddn")  # those two begin with a gradient at x
    assert int(result.gradients[0]) <= 1
    assert bool((result.distance[1:] > 0).all())
    assert [bool(name) for name in result.by] == found.tolist()
    assert set(result.by[1:]) <= {method, ""} if method != "auto" else set(result.by[1:]) <= {"fmn", "fab-t", ""}
    assert bool((result.queries >= result.gradients).all())


@pytest.mark.parametrize(("method", "norm"), PAIRS)
def test_the_answer_does_not_depend_on_the_batch(method, norm):
    model, x, y = task()
    options = QUICK[method]
    whole = nearest(model, x, y, norm, method, seed=3, **options)
    pieces = nearest(model, x, y, norm, method, seed=3, chunk=4, **options)
    order = torch.randperm(len(x))
    mixed = nearest(model, x[order], y[order], norm, method, seed=3, index=order, **options)
    alone = nearest(model, x[4:5], y[4:5], norm, method, seed=3, index=torch.tensor([4]), **options)
    for other, rows in ((pieces, slice(None)), (mixed, order), (alone, slice(4, 5))):
        assert torch.allclose(other.distance, whole.distance[rows], atol=1e-8)
        assert torch.allclose(other.x_adv, whole.x_adv[rows], atol=1e-8)
        assert torch.equal(other.gradients, whole.gradients[rows])
        assert torch.equal(other.queries, whole.queries[rows])


@pytest.mark.parametrize(("method", "norm"), ATTACKS)
def test_attacks_stay_inside_and_stop_early(method, norm):
    model, x, y = task()
    entry, threat = get("attack", method), BALLS[norm](BUDGET[norm])
    noise = Noise.for_batch(0, len(x))
    result = entry.function(model, x, y, threat, noise=noise, **QUICK[method])
    far = nearest(model, x, y, norm, method, **QUICK[method])
    assert bool(threat.contains(result.x_adv, x).all())
    assert bool((model(result.x_adv).argmax(1) != y)[result.success].all())
    assert [name == method for name in result.by] == result.success.tolist()
    assert bool((result.success | (far.distance > threat.budget)).all())
    assert bool((result.gradients <= far.gradients).all())
    assert bool(result.success.any())
    if method != "deepfool":  # it ends at its first point anyway
        assert int(result.gradients.sum()) < int(far.gradients.sum())
    none = entry.function(model, x, y, BALLS[norm](0.0), noise=noise, **QUICK[method])
    assert not bool(none.success.any())
    assert torch.equal(none.x_adv, x)


@pytest.mark.parametrize(("method", "norm"), ATTACKS)
def test_a_larger_budget_breaks_no_fewer(method, norm):
    model, x, y = task(name="mlp", dtype=torch.float32)
    function = get("attack", method).function
    broken = [
        function(model, x, y, BALLS[norm](scale * BUDGET[norm]), **QUICK[method]).success for scale in (0.5, 1, 2, 8)
    ]
    for smaller, larger in pairwise(broken):
        assert bool((smaller <= larger).all())


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_auto_is_exact_on_linear_models_inside_the_range(norm, classes):
    model = nn.Linear(12, classes).double().eval()
    model.bias.data = -0.5 * model.weight.data.sum(1)  # all classes meet in the middle
    x = (2 * torch.rand(20, 12, dtype=torch.float64) - 0.5).clamp(0, 1)  # many values at the ends of the range
    y = model(x).argmax(1)
    truth = exact(model, x, y, norm)
    found = nearest(model, x, y, norm, targets=9).distance
    reachable = torch.isfinite(truth)
    assert int(reachable.sum()) > 5
    assert bool((found[reachable] >= truth[reachable] - 1e-9).all())
    assert torch.allclose(found[reachable], truth[reachable], rtol=0.01)
    assert not bool(torch.isfinite(found[~reachable]).any())


def test_another_range_scales_the_distance():
    model, x, y = task(name="mlp")
    wide = nn.Sequential(nn.Linear(6, 6).double(), *model).eval()
    wide[0].weight.data, wide[0].bias.data = torch.eye(6).double() / 4, torch.full((6,), 0.5).double()
    narrow = nearest(model, x, y, "linf")
    result = nearest(wide, 4 * x - 2, y, "linf", low=-2.0, high=2.0)
    assert bool((result.x_adv.abs() <= 2).all())
    assert torch.allclose(result.distance, 4 * narrow.distance, rtol=0.02)


def test_auto_is_no_farther_than_its_members():
    model, x, y = task(12)
    for norm in ("linf", "l2"):
        best = nearest(model, x, y, norm).distance
        for method, options in (("fmn", {}), ("fab-t", {"steps": 40}), ("deepfool", {})):
            other = nearest(model, x, y, norm, method, **options).distance
            assert float(best.median()) <= float(other.median()) * 1.001


def test_a_softmax_at_the_end_does_not_stop_it():
    model, x, y = task(name="mlp")
    masked = nn.Sequential(*model, nn.Softmax(1)).eval()
    assert torch.allclose(nearest(masked, x, y, "l2").distance, nearest(model, x, y, "l2").distance, rtol=1e-3)


def test_the_line_search_ends_at_the_boundary():
    model = nn.Linear(2, 2, bias=False).double().eval()
    model.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    x = torch.tensor([[0.8, 0.2]], dtype=torch.float64)
    search = Search(x, torch.tensor([0]), "l2", 0.0, 1.0)
    far = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    with torch.no_grad():
        search.note(far, model(far))
        line_search(model, search, steps=8, name="here")
    result = search.closest()
    assert float(result.distance) == pytest.approx(0.3 * 2**0.5, rel=1e-3)
    assert result.by == ("here",)
    assert int(result.queries) == 1 + 2 + 8


def test_the_model_is_left_as_it_came():
    model, x, y = task()
    wanted = [p.requires_grad for p in model.parameters()]
    nearest(model, x, y, "l2", steps=5, polish=5)
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "l3"}, "unknown norm 'l3'"),
        ({"method": "fbn"}, "unknown method 'fbn'"),
        ({"stpes": 3}, "has no option 'stpes'. Did you mean 'steps'"),
        ({"goal": 3}, "has no option 'goal'"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"index": torch.arange(2)}, "index must have shape"),
        ({"steps": 1}, "at least 2 steps"),
        ({"low": 0.5}, "outside the valid range"),
        ({"low": 2.0}, "low < high"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    model, x, y = task()
    with pytest.raises(InputError, match=message):
        nearest(model, x, y, **({"norm": "l2"} | change))


def test_a_norm_that_a_method_does_not_minimise_is_refused():
    model, x, y = task()
    with pytest.raises(UnsupportedError, match=r"'ddn' minimises l2, not 'linf'"):
        nearest(model, x, y, "linf", "ddn")
    with pytest.raises(UnsupportedError, match="deepfool"):
        nearest(model, x, y, "l1", "deepfool")
    with pytest.raises(InputError, match="training mode"):
        nearest(model.train(), x, y, "l2")


def test_front_door_of_attacks_takes_them():
    model, x, y = task(dtype=torch.float32)
    for method in ("fab-t", "fmn", "deepfool"):
        result = hf.attack(model, x, y, hf.L2(0.5), method, steps=20)
        assert bool(result.success.any())
