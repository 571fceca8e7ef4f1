import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.bounding import interval
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.data import Dataset
from holdfast.errors import InputError
from holdfast.models.layers import Normalize
from holdfast.random import Noise
from holdfast.training import load_recipe, train
from holdfast.training.objectives import sparse as module
from holdfast.training.objectives.sparse import dense_bounds, sparse, sparse_margins
from patch_tasks import convnet, task


def mlp(features=8, classes=3, seed=0, normalize=False):
    torch.manual_seed(seed)
    layers = [nn.Flatten(), nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, classes)]
    return nn.Sequential(*([Normalize([0.4, 0.5], [0.5, 2.0])] if normalize else []), *layers).eval()


def loss_of(model, x, y, threat, ramp=1.0):
    return sparse(model, x, y, make_context(len(x), threat, ramp=ramp))[0]


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(0, 50))
def test_first_layer_by_brute_force(k, seed):
    """Every choice of k of 7 coordinates and every end for each of them."""
    model, (x, _) = mlp(7, seed=seed), task(2, (7,), 3, seed)
    op = trace(model, x).nodes[2].op
    low, high = torch.full_like(x, -0.2), torch.full_like(x, 1.0)
    lower, upper = dense_bounds(op, x, low, high, pixels=7, k=k)
    reached = []
    for pixels in itertools.combinations(range(7), k):
        for ends in itertools.product((-0.2, 1.0), repeat=k):
            point = x.clone()
            point[:, pixels] = torch.tensor(ends)
            reached.append(model[1](point))
    reached = torch.stack(reached)
    assert torch.allclose(lower, reached.amin(0), atol=1e-5)
    assert torch.allclose(upper, reached.amax(0), atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_linear_model_has_its_exact_worst_loss(layers):
    torch.manual_seed(0)
    dense = [nn.Linear(8, 2)] if layers == 1 else [nn.Linear(8, 5), nn.Linear(5, 2)]
    model = nn.Sequential(nn.Flatten(), *dense).eval()
    x, y = task(3, (2, 2, 2), 2)
    worst = torch.zeros(3)
    for pixels in itertools.combinations(range(4), 2):
        for ends in itertools.product((0.0, 1.0), repeat=4):
            point = x.flatten(2).clone()
            point[:, :, pixels] = torch.tensor(ends).view(2, 2)
            worst = torch.maximum(worst, cross_entropy(model(point), y, reduction="none"))
    assert loss_of(model, x, y, hf.Sparse(2)).item() == pytest.approx(worst.mean().item(), rel=1e-5)


@pytest.mark.parametrize(("shape", "normalize"), [((8,), False), ((2, 2, 2), False), ((2, 2, 2), True)])
@pytest.mark.parametrize("batch", [1, 5])
def test_equals_the_relaxation(shape, normalize, batch):
    model = mlp(normalize=normalize)
    x, y = task(batch, shape, 3)
    lower, upper = (x - 0.6).clamp(min=0), (x + 0.6).clamp(max=1)
    graph, region = trace(model, x), Region(lower, upper, x, hf.Sparse(2))
    ours = sparse_margins(graph, x, y, hf.Sparse(2), 0.6)
    r = linear.relaxation(graph, region, slopes=None, hidden=False, sound=False)
    theirs = interval.margins(graph, r.intervals, y, sound=False)
    assert torch.allclose(ours, theirs, atol=1e-5)
    weights = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(m.sum(), weights) for m in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_chunks_do_not_matter(monkeypatch):
    model, (x, y) = mlp(), task(5, (2, 2, 2), 3)
    whole = loss_of(model, x, y, hf.Sparse(2)).item()
    monkeypatch.setattr(module, "GAINS", 1)
    assert loss_of(model, x, y, hf.Sparse(2)).item() == whole


@pytest.mark.parametrize("make", [mlp, lambda: convnet((2, 9, 7), 3).eval()])
def test_all_pixels_are_the_whole_box_and_none_is_the_input(make):
    model = make()
    shape = (2, 2, 2) if isinstance(model[0], nn.Flatten) else (2, 9, 7)
    x, y = task(4, shape, 3)
    pixels = shape[1] * shape[2]
    graph = trace(model, x)
    box = interval.margin_bounds(graph, torch.zeros_like(x), torch.ones_like(x), y, sound=False)
    assert loss_of(model, x, y, hf.Sparse(pixels)).item() == pytest.approx(cross_entropy(-box, y).item(), rel=1e-4)
    clean = cross_entropy(model(x), y).item()
    assert loss_of(model, x, y, hf.Sparse(0)).item() == pytest.approx(clean, rel=1e-4)
    assert loss_of(model, x, y, hf.Sparse(2), ramp=0.0).item() == pytest.approx(clean, rel=1e-4)


@pytest.mark.parametrize("make", [mlp, lambda: convnet((2, 9, 7), 3).eval()])
def test_the_loss_bounds_that_of_every_change(make):
    model = make()
    shape = (2, 2, 2) if isinstance(model[0], nn.Flatten) else (2, 9, 7)
    x, y = task(4, shape, 3)
    threat = hf.Sparse(2)
    losses = [loss_of(model, x, y, threat, ramp).item() for ramp in (0.2, 0.6, 1.0)]
    assert losses == sorted(losses)
    with torch.no_grad():
        reached = [
            cross_entropy(model(threat.random_start(x, Noise.for_batch(i, 4))), y, reduction="none") for i in range(200)
        ]
    assert torch.stack(reached).amax(0).mean().item() <= losses[-1]


def test_metrics_and_refusals():
    model, (x, y) = mlp(), task(4, (2, 2, 2), 3)
    _, metrics = sparse(model, x, y, make_context(4, hf.Sparse(1), ramp=1e-4))
    assert float(metrics["accuracy"]) == float(metrics["verified"]) == (model(x).argmax(1) == y).float().mean().item()
    with pytest.raises(InputError, match="sparse:4"):
        sparse(model, x, y, make_context(4, hf.Patch(1, 1)))


def test_recipes():
    recipe = load_recipe("mnist-sparse")
    assert (recipe.threat, recipe.model.name, recipe.evaluate.certify) == ("sparse:4", "mlp-255", "sparse")
    data = hf.load_data("mnist-mini")
    few = Dataset("mnist-mini", data.train[:60], data.test[:2], data.classes)
    changes = {"epochs": 2, "budget": {"start": 0, "end": 1}, "batch_size": 20, "evaluate": {"count": 2}}
    row = train("mnist-mini-sparse", data=few, progress=False, **changes).history[-1]
    assert math.isfinite(row["train_loss"])
    assert row["validation_certified"] <= row["validation_clean"]
