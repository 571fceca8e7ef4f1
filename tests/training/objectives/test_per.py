"""Polyhedral envelope regularisation, held against closed forms, linear programs and finite differences."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.bounding.graph.trace import trace_batch
from holdfast.certificates.core.distance import distance, dual, half_spaces
from holdfast.data import Dataset, load_data
from holdfast.random import Noise
from holdfast.threats import L1, L2, Linf
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Parts
from holdfast.training.loop import budget_factor
from holdfast.training.objectives.per import envelope, hinge, others, per, per_at, sample, signed_distances
from holdfast.training.recipe.reading import load_recipe
from holdfast.training.step import fit

NORMS = ("linf", "l2", "l1")
ORDER = {"linf": 1, "l2": 2, "l1": torch.inf}
BALL = {"linf": Linf, "l2": L2, "l1": L1}
UNIT = (0.0, 1.0)


def number(value):
    return value.detach().item()


def network(*widths, seed=0):
    torch.manual_seed(seed)
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(widths)]
    return nn.Sequential(*[m for pair in layers for m in pair][:-1]).double()


def classified(*widths, count=40):
    """A network that knows all its classes, inputs, and what it takes them for."""
    model = network(*widths, seed=1).eval()
    x, _ = batch(count, widths[0], widths[-1])
    with torch.no_grad():
        model[-1].bias.sub_(model(x).mean(0))
    return model, x, model(x).argmax(1)


def batch(count, size, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 0.1 + 0.8 * torch.rand(count, size, generator=generator, dtype=torch.float64)
    return x, torch.arange(count) % classes


def projection(x, a, shift, norm):
    """Least norm of d with x + d in the unit box and <a, x + d> + shift = 0; None if there is none. By scipy."""
    b, n = a @ x + shift, len(x)
    bounds = np.stack([-x, 1 - x], 1)
    reach = np.minimum(a * bounds[:, 0], a * bounds[:, 1]) if b > 0 else np.maximum(a * bounds[:, 0], a * bounds[:, 1])
    if abs(reach.sum()) < abs(b):
        return None
    if norm == "l2":
        start = np.where(reach == a * bounds[:, 0], bounds[:, 0], bounds[:, 1]) * abs(b / reach.sum())
        plane = {"type": "eq", "fun": lambda d: a @ d + b, "jac": lambda d: a}
        options = {"ftol": 1e-14, "maxiter": 500}
        found = minimize(
            lambda d: d @ d,
            start,
            jac=lambda d: 2 * d,
            bounds=bounds,
            constraints=plane,
            method="SLSQP",
            options=options,
        )
        assert found.success
        return math.sqrt(found.fun)
    # |d_j| <= t_j; for linf all t_j are one.
    sizes = np.ones((n, 1)) if norm == "linf" else np.eye(n)
    upper = np.block([[np.eye(n), -sizes], [-np.eye(n), -sizes]])
    found = linprog(
        np.r_[np.zeros(n), np.ones(sizes.shape[1])],
        A_ub=upper,
        b_ub=np.zeros(2 * n),
        A_eq=np.r_[a, np.zeros(sizes.shape[1])][None],
        b_eq=[-b],
        bounds=[*map(tuple, bounds), *[(0, None)] * sizes.shape[1]],
    )
    assert found.status == 0
    return found.fun


@pytest.mark.parametrize("norm", NORMS)
@settings(max_examples=12)
@given(seed=st.integers(0, 10**6))
def test_signed_distance_is_the_projection_on_both_sides(norm, seed):
    generator = np.random.default_rng(seed)
    x, slopes = generator.random(5), generator.normal(size=(6, 5))
    x[generator.random(5) < 0.3] = 0.0  # values at the edge of the range
    shifts = -slopes @ x + generator.normal(size=6)
    tensors = (torch.from_numpy(v)[None] for v in (x, slopes, shifts))
    found = signed_distances(*tensors, norm, UNIT)[0]
    for a, shift, d in zip(slopes, shifts, found.tolist(), strict=True):
        b, expected = a @ x + shift, projection(x, a, shift, norm)
        if expected is None:  # no valid input lies on the face
            dual = np.linalg.norm(a, ORDER[norm])
            assert d == (math.inf if b > 0 else pytest.approx(b / dual, rel=1e-9))
        else:
            assert d == pytest.approx(math.copysign(expected, b), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("norm", NORMS)
def test_on_the_right_side_it_is_the_distance_of_the_certificate(norm):
    torch.manual_seed(0)
    x, slope, shift = torch.rand(4, 2, 3), torch.randn(4, 5, 2, 3), torch.randn(4, 5)
    found = signed_distances(x, slope, shift, norm, UNIT)
    known = distance(dual(half_spaces(x, slope, shift, valid=UNIT, sound=False), norm))
    right = found > 0
    assert right.any()
    assert not right.all()
    assert torch.allclose(found[right].double(), known[right], rtol=1e-4)
    assert (known[~right] == 0).all()


def test_flat_faces_give_no_nan():
    x, slope = torch.rand(1, 3), torch.zeros(1, 2, 3, requires_grad=True)
    for norm in NORMS:
        found = signed_distances(x, slope, torch.tensor([[1.0, -1.0]]), norm, UNIT)
        assert found.tolist() == [[math.inf, 0.0]]
        (gradient,) = torch.autograd.grad(hinge(found, 0.1, 2).sum(), slope, allow_unused=True, materialize_grads=True)
        assert (gradient == 0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_gradient_of_the_distance(norm):
    torch.manual_seed(1)
    x = torch.rand(3, 6, dtype=torch.float64)
    slope = torch.randn(3, 4, 6, dtype=torch.float64)
    shift = (torch.randn(3, 4, dtype=torch.float64) - (slope @ x[:, :, None])[..., 0]).requires_grad_()
    slope.requires_grad_()
    found = signed_distances(x, slope, shift, norm, UNIT)
    assert (found < 0).any()
    plain = ((slope @ x[:, :, None])[..., 0] + shift) / torch.linalg.vector_norm(slope, ORDER[norm], dim=2)
    assert (found.isfinite() & ((found - plain).abs() > 1e-3)).any()  # the range is in the way of some
    weight = torch.where(found.isfinite(), torch.rand_like(found), 0.0).detach()

    def weighted(slope, shift):
        values = signed_distances(x, slope, shift, norm, UNIT)
        return (torch.where(weight > 0, values, 0.0) * weight).sum()

    assert torch.autograd.gradcheck(weighted, (slope, shift), eps=1e-7, atol=1e-5)


def test_empty_batch_has_no_distances():
    found = signed_distances(torch.rand(0, 3), torch.rand(0, 2, 3), torch.rand(0, 2), "linf", UNIT)
    assert found.shape == (0, 2)
    assert hinge(found, 1.0, 2).shape == (0,)


def test_hinge_takes_the_nearest_and_stops_at_alpha():
    d = torch.tensor([[0.1, -0.2, 0.5, math.inf], [0.3, 0.4, 0.5, 0.6]])
    assert hinge(d, 0.2, 1).tolist() == pytest.approx([2.0, 0.0])
    assert hinge(d, 0.2, 2).tolist() == pytest.approx([2.5, 0.0])
    assert torch.equal(hinge(d, 0.6, 4), (1 - d / 0.6).clamp(min=0).sum(1))
    assert torch.equal(hinge(d, 0.6, 9), hinge(d, 0.6, 4))
    assert (hinge(d[1:], 0.3, 4) == 0).all()


def linear_closed_form(model, x, y, norm, alpha, count):
    """PER of a linear model whose faces are all reached without meeting the range."""
    z, rows = model(x), []
    for i, label in enumerate(y.tolist()):
        for j in range(z.shape[1]):
            if j != label:
                dual = torch.linalg.vector_norm(model.weight[label] - model.weight[j], ORDER[norm])
                rows.append((z[i, label] - z[i, j]) / dual)
    nearest = torch.stack(rows).view(len(x), -1).sort(1).values[:, :count]
    return (1 - nearest / alpha).clamp(min=0).sum(1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_linear_model_value_and_gradient(norm, count):
    torch.manual_seed(2)
    model = nn.Linear(6, 4).double()
    with torch.no_grad():
        model.weight.mul_(3)
    x, y = batch(8, 6, 4)
    x = 0.45 + 0.1 * x
    with torch.no_grad():  # small margins: every face is near
        model.bias.copy_(-(model.weight @ torch.full((6,), 0.5, dtype=torch.float64)))
    context = make_context(8, BALL[norm](0.1))
    loss, metrics = per(model, x, y, context, alpha=2.0, beta=0.7, count=count)
    expected = linear_closed_form(model, x, y, norm, 0.2, count).mean()
    assert number(expected) > 0.1
    assert number(metrics["per"]) == pytest.approx(number(expected), rel=1e-9)
    whole = cross_entropy(model(x), y) + 0.7 * expected
    assert number(loss) == pytest.approx(number(whole), rel=1e-9)
    for got, want in zip(*(torch.autograd.grad(v, list(model.parameters())) for v in (loss, whole)), strict=True):
        assert torch.allclose(got, want, rtol=1e-8)


def test_no_penalty_where_all_classes_are_far_enough():
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(4, dtype=torch.float64)[:3])
        model.bias.zero_()
    x = torch.full((3, 4), 0.1, dtype=torch.float64)
    x[range(3), range(3)] = 0.9
    y = torch.arange(3)
    # Each face is 0.8 / 2 away.
    for alpha, penalised in ((3.9, False), (4.1, True)):
        loss, metrics = per(model, x, y, make_context(3, Linf(0.1)), alpha=alpha, beta=1.0)
        assert (number(metrics["per"]) > 0) == penalised
        assert (number(loss) > number(cross_entropy(model(x), y))) == penalised
        assert number(metrics["verified"]) == 1.0


@pytest.mark.parametrize("bounds", ["linear", "interval", "forward"])
@pytest.mark.parametrize("norm", NORMS)
def test_gradient_by_finite_differences(bounds, norm):
    model = network(5, 7, 6, 3, seed=4)
    x, y = batch(4, 5, 3, seed=4)
    context = make_context(4, BALL[norm](0.05))

    def loss():
        return per(model, x, y, context, alpha=3.0, beta=1.0, bounds=bounds)[0]

    value = loss()
    assert number(value - cross_entropy(model(x), y)) > 0.01
    gradients = torch.autograd.grad(value, list(model.parameters()))
    torch.manual_seed(0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        direction, step = torch.randn_like(parameter), 1e-6
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * step)
                values.append(number(loss()))
                parameter.sub_(direction, alpha=sign * step)
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(number((gradient * direction).sum()), rel=1e-4)


def test_linear_bounds_prove_more_than_interval_bounds():
    model, x, y = classified(5, 12, 12, 12, 3)
    metrics = {b: per(model, x, y, make_context(40, Linf(0.05)), bounds=b)[1] for b in ("linear", "interval")}
    assert number(metrics["linear"]["verified"]) > number(metrics["interval"]["verified"]) > 0
    assert number(metrics["linear"]["per"]) < number(metrics["interval"]["per"])


@pytest.mark.parametrize("norm", NORMS)
def test_forward_form_gives_the_faces_of_the_certificate(norm):
    """The same envelope as `pec(forward=True)`, whose whole-ball proofs it counts."""
    model, x, y = classified(4, 12, 12, 3)
    threat = BALL[norm]({"linf": 0.05, "l2": 0.08, "l1": 0.1}[norm])
    graph, _ = trace_batch(model, x)
    slope, shift, proved = envelope(graph, x, y, threat, "forward")
    distances = signed_distances(x, slope, shift, norm, UNIT)
    found = hf.certify(model, x, y, threat, "pec", forward=True, sound=False)
    assert torch.equal(proved, found.certified)
    assert 0 < int(proved.sum()) < len(x)
    nearest = distances.detach().amin(1).clamp(0, threat.eps)
    assert torch.allclose(torch.where(found.certified, threat.eps, nearest), found.radius, atol=1e-9)


def test_verified_is_what_the_certificate_proves():
    model, x, y = classified(5, 12, 12, 3)
    proved = hf.certify(model, x, y, Linf(0.02), "fastlin").certified.double().mean()
    assert 0 < number(proved) < 1
    assert number(per(model, x, y, make_context(40, Linf(0.02)))[1]["verified"]) == pytest.approx(number(proved))


def test_faces_bound_the_margins_in_the_ball():
    model, threat = network(5, 12, 12, 3, seed=1), L2(0.3)
    x, y = batch(6, 5, 3)
    graph, _ = trace_batch(model, x)
    slope, shift, _ = envelope(graph, x, y, threat, "linear")
    assert slope.shape == (6, 2, 5)
    for seed in range(20):
        near = threat.random_start(x, Noise(seed, torch.arange(6)))
        z = model(near)
        margins = others(z.gather(1, y[:, None]) - z, y)
        assert (margins >= (slope @ near[:, :, None])[..., 0] + shift - 1e-9).all()


def test_alpha_is_in_units_of_the_full_budget():
    model = nn.Linear(6, 4).double()
    x, y = batch(8, 6, 4)
    full, half = (
        per(model, x, y, make_context(8, Linf(0.1 * ramp), ramp=ramp), alpha=2.0)[1]["per"] for ramp in (1.0, 0.5)
    )
    assert number(full) == pytest.approx(number(half))
    assert number(full) != pytest.approx(number(per(model, x, y, make_context(8, Linf(0.1)), alpha=3.0)[1]["per"]))


@pytest.mark.parametrize("objective", [per, per_at])
def test_no_penalty_before_its_start(objective):
    model = network(5, 7, 3)
    x, y = batch(6, 5, 3)
    parts = Parts(attack=lambda model, x, y, loss, context: x)
    context = make_context(6, Linf(0.1), parts=parts)
    early = [
        objective(model, x, y, context, start_epoch=1),
        objective(model, x, y, replace(context, adversary=Linf(0.0), ramp=0.0)),
    ]
    late, figures = objective(model, x, y, replace(context, epoch=1), start_epoch=1)
    assert number(late) > number(early[0][0])
    for loss, metrics in early:
        assert number(loss) == pytest.approx(number(cross_entropy(model(x), y)))
        assert metrics.keys() == figures.keys()
        assert number(metrics["per"]) == 0 < number(figures["per"])
    right = number(figures["accuracy"])
    assert right > 0
    # Without a budget nothing is left to prove; before the start there is, and nothing has been proved.
    assert [number(metrics["verified"]) for _, metrics in early] == [0, pytest.approx(right)]


def test_per_at_without_a_move_is_per():
    model = network(5, 7, 6, 3)
    x, y = batch(6, 5, 3)
    stays = make_context(6, Linf(0.1), parts=Parts(attack=lambda model, x, y, loss, context: x))
    for options in ({}, {"bounds": "interval"}, {"bounds": "forward"}, {"share": 0.5}):
        a, b = per_at(model, x, y, stays, **options), per(model, x, y, stays, **options)
        assert number(a[0]) == pytest.approx(number(b[0]), rel=1e-12)
        assert number(a[1]["per"]) == pytest.approx(number(b[1]["per"]), rel=1e-12)


def test_per_at_looks_at_both_inputs():
    model = network(5, 7, 6, 3)
    x, y = batch(6, 5, 3)
    context = make_context(6, Linf(0.1), parts=Parts(attack=partial(pgd, steps=3)))
    loss, metrics = per_at(model, x, y, context, beta=0.0)
    x_adv = pgd(model, x, y, fit, context, steps=3)
    assert not torch.equal(x_adv, x)
    assert number(loss) == pytest.approx(number((cross_entropy(model(x), y) + cross_entropy(model(x_adv), y)) / 2))
    assert {"accuracy", "robust_accuracy", "per", "verified"} <= set(metrics)


@pytest.mark.parametrize("norm", NORMS)
def test_the_fgsm_point_of_a_linear_model_costs_no_less(norm):
    torch.manual_seed(5)
    model, threat = nn.Linear(6, 2).double(), BALL[norm](0.1)
    x, y = batch(10, 6, 2)
    w = (model.weight[1 - y] - model.weight[y]).detach()  # the way to the other class
    steepest = {"linf": w.sign(), "l2": w / w.norm(dim=1, keepdim=True)}
    steepest["l1"] = nn.functional.one_hot(w.abs().argmax(1), 6) * w.sign()
    moved = threat.project(x + 0.1 * steepest[norm], x)
    values = []
    for point in (x, moved):
        parts = Parts(attack=lambda model, x, y, loss, context, point=point: point)
        values.append(per_at(model, x, y, make_context(10, threat, parts=parts), alpha=9.0)[1]["per"])
    assert number(values[1]) > number(values[0]) > 0


def test_a_part_of_the_batch_estimates_the_whole():
    model = network(5, 7, 6, 3)
    x, y = batch(6, 5, 3)
    whole = number(per(model, x, y, make_context(6, Linf(0.1)))[1]["per"])
    found, seen = [], torch.zeros(6)
    for seed in range(300):
        context = make_context(6, Linf(0.1), seed=seed)
        part = sample(context, 0.5)
        assert len(set(part.tolist())) == 3
        seen[part] += 1
        if seed < 150:
            found.append(number(per(model, x, y, context, share=0.5)[1]["per"]))
    error = np.std(found) / math.sqrt(len(found))
    assert error > 0
    assert abs(np.mean(found) - whole) < 3 * error
    assert (seen / 300 - 0.5).abs().max() < 0.12  # four standard errors


def test_part_of_a_batch_is_never_empty():
    assert len(sample(make_context(3, Linf(0.1)), 0.01)) == 1
    assert len(sample(make_context(1, Linf(0.1)), 0.2)) == 1


def test_each_example_counts_alone():
    model = network(5, 7, 6, 3)
    x, y = batch(5, 5, 3)
    one = [per(model, x[i : i + 1], y[i : i + 1], make_context(1, Linf(0.1)))[0] for i in range(5)]
    many = per(model, x, y, make_context(5, Linf(0.1)))[0]
    assert number(torch.stack(one).mean()) == pytest.approx(number(many), rel=1e-12)


def test_images_and_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 1 * 2, 5),
    ).train()  # fmt: skip
    x, y = torch.rand(6, 1, 5, 7), torch.arange(6) % 5
    for bounds in ("linear", "interval", "forward"):
        loss, metrics = per(model, x, y, make_context(6, Linf(0.05)), bounds=bounds)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert number(metrics["per"]) > 0


PUBLISHED = [  # Table 3.5: the distance alpha in the unit of the threat, beta; and the share of a batch
    *((f"mnist-per{at}-fc1{kind}", 0.15, 0.1, 1.0) for at in ("", "-at") for kind in ("", "-sigmoid", "-tanh")),
    *((f"mnist-per{at}-fc1{kind}-l2", 0.45, 1.0, 1.0) for at in ("", "-at") for kind in ("", "-sigmoid", "-tanh")),
    ("mnist-per", 0.15, 0.3, 0.2),
    ("mnist-per-at", 0.15, 0.03, 0.2),
    ("mnist-i-per-at", 0.15, 0.03, 0.2),
    ("mnist-per-l2", 0.45, 1.0, 0.2),
    ("mnist-per-at-l2", 0.45, 1.0, 0.2),
    ("cifar10-per", 0.1, 0.0003, 0.1),
    ("cifar10-per-at", 0.1, 0.001, 0.1),
    ("cifar10-per-l2", 0.15, 0.3, 0.1),
    ("cifar10-per-at-l2", 0.15, 1.0, 0.1),
]


@pytest.mark.parametrize(("name", "alpha", "beta", "share"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_recipes_hold_the_published_numbers(name, alpha, beta, share):
    recipe = load_recipe(name)
    options = recipe.objective.options
    full = recipe.adversary.budget * recipe.budget.options.get("final", 1.0)
    assert recipe.objective.name == ("per-at" if "-at" in name else "per")
    assert options["alpha"] * full == pytest.approx(alpha, rel=1e-6)
    assert (options["beta"], options["share"]) == (beta, share)
    assert options["bounds"] == ("interval" if "-i-" in name else "linear")
    if "fc1" in name:
        first = 0.02 if name.endswith("l2") else 0.0064
        risen = [budget_factor(recipe, t) * recipe.adversary.budget for t in (0, 20, 40, 60, 80, 99.9)]
        assert risen == pytest.approx([first * 2**i for i in (0, 1, 2, 3, 4, 4)])
        assert recipe.model.options.get("activation", "relu") in (name.split("-")[-2], name.split("-")[-1], "relu")
        assert recipe.evaluate.certify == ("crown" if "sigmoid" in name or "tanh" in name else "fastlin")
    if recipe.attack is not None:
        assert recipe.attack.options["step_size"] == pytest.approx(recipe.adversary.budget / 5)
    assert (options["count"], recipe.epochs, recipe.batch_size) == (4, 100, 100)
    assert (recipe.optimizer.name, recipe.optimizer.lr) == ("adam", 1e-3)
    assert recipe.adversary.name == ("l2" if name.endswith("l2") else "linf")


@pytest.mark.parametrize("name", ["mnist-mini-per", "mnist-mini-per-at"])
def test_small_recipes_train(name):
    data = load_data("mnist-mini")
    few = Dataset("mnist-mini", data.train[:80], data.test[:10], data.classes)
    changes = {
        "epochs": 2,
        "batch_size": 20,
        "budget.end": 1,
        "objective.start_epoch": 0,
        "learning_rate.name": "constant",
    }
    result = hf.train(name, data=few, progress=False, **changes)
    assert all(math.isfinite(value) for row in result.history for value in row.values())
    assert {"train_per", "train_verified", "validation_certified"} <= set(result.history[-1])
    assert result.model(few.test.x).isfinite().all()
