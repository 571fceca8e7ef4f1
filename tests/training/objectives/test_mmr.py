"""The maximum margin regulariser, held against gradients by autograd, closed forms and finite differences."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.bounding.graph.trace import trace_batch
from holdfast.data import Dataset, load_data
from holdfast.errors import UnsupportedError
from holdfast.threats import L1, L2, Linf
from holdfast.training.context import Parts
from holdfast.training.objectives.mmr import boundary_distances, local_map, mmr, mmr_at, region_distances

ORDER = {"linf": 1, "l2": 2, "l1": torch.inf}
BALL = {"linf": Linf, "l2": L2, "l1": L1}


def number(value):
    return value.detach().item()


def dense(activation=nn.ReLU):
    torch.manual_seed(0)
    layers = [[nn.Linear(a, b), activation()] for a, b in pairwise((6, 8, 7, 4))]
    return nn.Sequential(*[m for pair in layers for m in pair][:-1]).double()


def convolutional():
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 2, 3, 2, 1), nn.Conv2d(2, 3, 3, 1, 1)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(3 * 3 * 4, 4)).double()
    for parameter in model.parameters():  # by default most of its units are dead
        nn.init.normal_(parameter, std=0.5)
    return model


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.double()

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(torch.relu(h + self.second(h)))


MODELS = {
    "dense": (dense, (6,)),
    "leaky": (lambda: dense(lambda: nn.LeakyReLU(0.1)), (6,)),
    "convolutional": (convolutional, (1, 5, 7)),
}


def by_autograd(model, x, y, q):
    """Distances of all hidden units and of all other classes, from the Jacobians of one input at a time."""
    inner, outer = [], []
    for point, label in zip(x, y.tolist(), strict=True):
        point = point[None].clone().requires_grad_()
        value, units = point, []
        for layer in model:
            if isinstance(layer, nn.ReLU | nn.LeakyReLU):
                units += list(value.flatten())
            value = layer(value)
        rows = [torch.autograd.grad(u, point, retain_graph=True)[0].flatten() for u in units]
        inner.append(torch.stack([u.abs() / torch.linalg.vector_norm(g, q) for u, g in zip(units, rows, strict=True)]))
        gaps = [value[0, label] - value[0, j] for j in range(value.shape[1]) if j != label]
        rows = [torch.autograd.grad(g, point, retain_graph=True)[0].flatten() for g in gaps]
        outer.append(torch.stack([m / torch.linalg.vector_norm(g, q) for m, g in zip(gaps, rows, strict=True)]))
    return torch.stack(inner).detach(), torch.stack(outer).detach()


@pytest.mark.parametrize("norm", ORDER)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 5])
def test_distances_are_those_of_the_jacobians(name, norm, count):
    make, shape = MODELS[name]
    model, q = make(), ORDER[norm]
    x, y = torch.rand(count, *shape, dtype=torch.float64), torch.arange(count) % 4
    r = local_map(trace_batch(model, x)[0], x)
    inner, outer = by_autograd(model, x, y, q)
    assert torch.allclose(region_distances(r, q).sort(1).values, inner.sort(1).values, rtol=1e-9)
    assert torch.allclose(boundary_distances(r, y, q), outer, rtol=1e-9)


def test_skip_connections():
    model, x = Residual(), torch.rand(3, 6, dtype=torch.float64)
    r = local_map(trace_batch(model, x)[0], x)
    h = torch.relu(model.first(x))
    second = h + model.second(h)
    active = (h > 0).double()
    rows = (torch.eye(6, dtype=torch.float64) + model.second.weight) * active[:, None] @ model.first.weight
    expected = [model.first(x).abs() / model.first.weight.abs().sum(1), second.abs() / rows.abs().sum(2)]
    assert torch.allclose(region_distances(r, 1.0), torch.cat(expected, 1))


def one_unit():
    """z = (relu(2 x - 1), 0): at x = 0.8 the region ends at 0.5; the classes meet where it does."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2)).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), ([[2.0]], [-1.0], [[1.0], [0.0]], [0.0, 0.0]), strict=True):
            parameter.copy_(torch.tensor(value))
    return model


def test_one_unit_in_closed_form():
    model, x, y = one_unit(), torch.tensor([[0.8]], dtype=torch.float64), torch.tensor([0])
    for gamma_b, gamma_d, expected in ((1.0, 1.0, 0.0), (6.0, 1.0, 0.5), (1.0, 4.0, 0.25), (6.0, 4.0, 0.75)):
        loss, metrics = mmr(model, x, y, make_context(1, Linf(0.1)), weight=2.0, gamma_b=gamma_b, gamma_d=gamma_d)
        assert number(metrics["mmr"]) == pytest.approx(expected)
        assert number(loss) == pytest.approx(number(cross_entropy(model(x), y)) + 2 * expected)
    # On the wrong side the distance is negative.
    _, metrics = mmr(model, x, torch.tensor([1]), make_context(1, Linf(0.1)), gamma_b=1.0, gamma_d=3.0)
    assert number(metrics["mmr"]) == pytest.approx(2.0)


def test_a_constant_unit_is_infinitely_far():
    model = one_unit()
    with torch.no_grad():
        model[0].weight.zero_()
    x, y = torch.tensor([[0.8]], dtype=torch.float64), torch.tensor([0])
    loss, metrics = mmr(model, x, y, make_context(1, L2(0.1)))
    loss.backward()
    assert number(metrics["mmr"]) == 0
    assert number(mmr(model, x, y + 1, make_context(1, L2(0.1)))[1]["mmr"]) == 0
    with torch.no_grad():
        model[0].bias.fill_(1.0)
    assert number(mmr(model, x, y + 1, make_context(1, L2(0.1)))[1]["mmr"]) == 1.0  # wrong, and far from nowhere
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("progress", "units"), [(0.0, 9), (0.5, 6), (1.0, 3)])
def test_fewer_units_are_penalised_as_the_run_goes_on(progress, units):
    model, x, y = dense(), torch.rand(5, 6, dtype=torch.float64), torch.arange(5) % 4
    inner, outer = by_autograd(model, x, y, 1)
    context = make_context(5, Linf(0.1), progress=progress)
    _, metrics = mmr(model, x, y, context, gamma_b=5.0, gamma_d=20.0, k_b=0.6, k_b_end=0.2, k_d=2)
    near = (1 - inner.sort(1).values[:, :units] / 0.5).clamp(min=0).mean()
    wide = (1 - outer.sort(1).values[:, :2] / 2.0).clamp(min=0).mean()
    assert number(metrics["mmr"]) == pytest.approx(number(near + wide), rel=1e-9)


@pytest.mark.parametrize("norm", ORDER)
def test_gradient_by_finite_differences(norm):
    model, x, y = dense(), torch.rand(4, 6, dtype=torch.float64), torch.arange(4)
    context = make_context(4, BALL[norm](0.1))

    def loss():
        return mmr(model, x, y, context, weight=1.0, gamma_b=4.0, gamma_d=4.0, k_b=0.5)[0]

    gradients = torch.autograd.grad(loss(), list(model.parameters()))
    torch.manual_seed(0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        direction, step, values = torch.randn_like(parameter), 1e-6, []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * step)
                values.append(number(loss()))
                parameter.sub_(direction, alpha=sign * step)
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(number((gradient * direction).sum()), rel=1e-4, abs=1e-6)


def test_mmr_at_without_a_move_is_mmr_and_with_one_looks_there():
    model, x, y = dense(), torch.rand(4, 6, dtype=torch.float64), torch.arange(4)
    moved = (x + 0.05).clamp(max=1)

    def at(point):
        return make_context(4, Linf(0.1), parts=Parts(attack=lambda model, x, y, loss, context: point))

    assert number(mmr_at(model, x, y, at(x))[0]) == pytest.approx(number(mmr(model, x, y, at(x))[0]), rel=1e-12)
    loss, metrics = mmr_at(model, x, y, at(moved), weight=3.0)
    there = mmr(model, moved, y, at(x), weight=3.0)[1]["mmr"]
    assert number(metrics["mmr"]) == pytest.approx(number(there), rel=1e-12)
    fits = (cross_entropy(model(x), y) + cross_entropy(model(moved), y)) / 2
    assert number(loss) == pytest.approx(number(fits + 3 * there), rel=1e-12)


def test_no_regulariser_without_a_budget():
    model, x, y = dense(), torch.rand(4, 6, dtype=torch.float64), torch.arange(4)
    loss, metrics = mmr(model, x, y, make_context(4, Linf(0.0), ramp=0.0))
    assert number(loss) == pytest.approx(number(cross_entropy(model(x), y)))
    assert number(metrics["mmr"]) == 0


@pytest.mark.parametrize("layer", [nn.Sigmoid(), nn.Tanh(), nn.MaxPool2d(2)])
def test_other_networks_are_refused_by_name(layer):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), layer, nn.Flatten(), nn.LazyLinear(3))
    x, y = torch.rand(2, 1, 6, 6), torch.arange(2)
    model(x)
    with pytest.raises(UnsupportedError, match="layer '1': 'mmr' measures the linear regions"):
        mmr(model, x, y, make_context(2, Linf(0.1)))


def test_small_recipe_trains():
    data = load_data("mnist-mini")
    few = Dataset("mnist-mini", data.train[:80], data.test[:10], data.classes)
    for changes in ({}, {"objective.name": "mmr-at", "attack.name": "pgd", "attack.steps": 2}):
        changes |= {"epochs": 1, "batch_size": 20, "learning_rate.name": "constant"}
        result = hf.train("mnist-mini-mmr", data=few, progress=False, **changes)
        assert all(math.isfinite(value) for row in result.history for value in row.values())
        assert result.history[-1]["train_mmr"] > 0
