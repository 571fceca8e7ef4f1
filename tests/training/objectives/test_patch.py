import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.bounding import interval
from holdfast.bounding.fast import patches as local
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.training import load_recipe, train
from holdfast.training.objectives import patch as module
from holdfast.training.objectives.patch import groups, patch, place_margins, worst_margins
from holdfast.utils.reference import reference
from patch_tasks import convnet, dense_margins, task


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("size", [(2, 3), (1, 1), (9, 7)])
def test_all_places_equal_a_loop_over_them(batch, size):
    model, threat = convnet().eval(), hf.Patch(*size)
    x, y = task(batch)
    loss, metrics = patch(model, x, y, make_context(batch, threat, ramp=0.4), places=0)
    graph = trace(model, x)
    margins = dense_margins(graph, x, y, threat, threat.locations((2, 9, 7)), 0.4).amin(1)
    assert loss.item() == pytest.approx(cross_entropy(-margins, y).item(), rel=1e-5)
    weights = list(model.parameters())
    ours, theirs = (torch.autograd.grad(v, weights) for v in (loss, cross_entropy(-margins, y)))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    assert float(metrics["verified"]) == (margins.scatter(1, y[:, None], 1.0) > 0).all(1).float().mean().item()
    assert float(metrics["accuracy"]) == (model(x).argmax(1) == y).float().mean().item()


def test_no_budget_is_the_cross_entropy():
    model, threat = convnet().eval(), hf.Patch(2, 2)
    x, y = task()
    for options in ({"places": 3}, {"places": 0}, {"places": 0, "pool": 2}):
        loss, _ = patch(model, x, y, make_context(5, threat, ramp=0.0), **options)
        assert loss.item() == pytest.approx(cross_entropy(model(x), y).item(), rel=1e-5)
        near, _ = patch(model, x, y, make_context(5, threat, ramp=1e-6), **options)
        assert near.item() == pytest.approx(loss.item(), rel=1e-4)


def test_the_loss_bounds_that_of_every_patch():
    model, threat = convnet().eval(), hf.Patch(3, 2)
    x, y = task()
    worst = patch(model, x, y, make_context(5, threat), places=0)[0].item()
    pooled = patch(model, x, y, make_context(5, threat), places=0, pool=3)[0].item()
    with torch.no_grad():
        reached = [
            cross_entropy(model(threat.random_start(x, Noise.for_batch(i, 5))), y, reduction="none") for i in range(200)
        ]
    assert torch.stack(reached).amax(0).mean().item() <= worst <= pooled
    graph, logits = trace_batch(model, x)
    margins = worst_margins(graph, x, y, threat, threat.locations((2, 9, 7))[:, None], 1.0)
    assert bool((margins.gather(1, y[:, None]) == 0).all())
    assert bool((margins <= logits.gather(1, y[:, None]) - logits + 1e-5).all())


def test_merging_the_last_layer_is_tighter():
    model, threat = convnet().eval(), hf.Patch(2, 2)
    x, _ = task()
    graph = trace(model, x)
    merged, plain = [], []
    for lower, upper in zip(*(b.flatten(0, 1) for b in threat.boxes(x, threat.locations((2, 9, 7)))), strict=True):
        label = torch.zeros(1, dtype=torch.long)
        merged.append(interval.margin_bounds(graph, lower[None], upper[None], label, sound=False))
        low, high = interval.output_bounds(graph, lower[None], upper[None], sound=False)
        plain.append((low[:, :1] - high).scatter(1, label[:, None], 0.0))
    merged, plain = torch.cat(merged), torch.cat(plain)
    assert bool((merged >= plain - 1e-6).all())
    assert bool((merged > plain + 1e-4).any())


def test_random_places_never_exceed_all_of_them():
    model, threat = convnet().eval(), hf.Patch(2, 2)
    x, y = task()
    every = patch(model, x, y, make_context(5, threat), places=0)[0].item()
    few = [patch(model, x, y, make_context(5, threat, seed=s), places=2)[0].item() for s in range(5)]
    assert max(few) <= every + 1e-6
    assert len(set(few)) == 5
    # With so many draws from 48 places all of them are met.
    assert patch(model, x, y, make_context(5, threat), places=600)[0].item() == pytest.approx(every, rel=1e-6)


def test_drawn_places_belong_to_the_input_not_to_the_batch():
    model, threat = convnet().eval(), hf.Patch(2, 2)
    x, y = task()
    context = make_context(5, threat)
    alone = [
        patch(model, x[i : i + 1], y[i : i + 1], replace(context, noise=context.noise[i : i + 1]), places=3)[0].item()
        for i in range(5)
    ]
    assert patch(model, x, y, context, places=3)[0].item() == pytest.approx(sum(alone) / 5, rel=1e-5)


@pytest.mark.parametrize("places", [3, 0])
def test_chunks_change_neither_loss_nor_gradient(monkeypatch, places):
    model, threat = convnet().eval(), hf.Patch(2, 2)
    x, y = task()
    results = []
    for boxes in (2**13, 7):
        monkeypatch.setattr(module, "BOXES", boxes)
        loss, _ = patch(model, x, y, make_context(5, threat), places=places)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))


def flat():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(126, 6), nn.ReLU(), nn.Linear(6, 4))


@pytest.mark.parametrize("make", [convnet, flat])
@pytest.mark.parametrize("pool", [1, 2, 3])
def test_pooling_is_the_union_after_the_first_layer(make, pool):
    model, threat, shape = make().eval(), hf.Patch(2, 2), (2, 9, 7)
    x, y = task()
    graph, corners = trace(model, x), threat.locations(shape)
    ours = place_margins(graph, x, y, threat, corners[groups(threat, x, pool)].expand(5, -1, -1, 2), 1.0).amin(1)
    first = 1 if make is convnet else 2
    head, rest = type(graph)(graph.nodes[: first + 1]), graph.after(first)
    margins = []
    for top, left in itertools.product(range(0, 8, pool), range(0, 6, pool)):
        near = [p for p in corners.tolist() if top <= p[0] < top + pool and left <= p[1] < left + pool]
        boxes = threat.boxes(x, torch.tensor(near))
        low, high = interval.output_bounds(head, *(b.flatten(0, 1) for b in boxes), sound=False)
        low, high = low.unflatten(0, (5, -1)).amin(1), high.unflatten(0, (5, -1)).amax(1)
        margins.append(interval.margin_bounds(rest, low, high, y, sound=False))
    assert torch.allclose(ours, torch.stack(margins).amin(0), atol=1e-5)
    every = dense_margins(graph, x, y, threat, corners, 1.0).amin(1)
    assert bool((ours <= every + 1e-5).all())
    assert torch.allclose(ours, every, atol=1e-5) == (pool == 1)


def deep():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(126, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


@pytest.mark.parametrize(("make", "layers"), [(convnet, (1, 2)), (deep, (2, 2))])
@pytest.mark.parametrize(("pool", "again"), [(2, 2), (1, 2), (3, 2)])
def test_pooling_again_is_the_union_of_unions_after_the_second_layer(make, layers, pool, again):
    model, threat, shape = make().eval(), hf.Patch(2, 2), (2, 9, 7)
    x, y = task()
    graph, corners = trace(model, x), threat.locations(shape)
    index = groups(threat, x, pool, again)
    assert index.shape[1] == (pool * again) ** 2
    ours = worst_margins(graph, x, y, threat, corners[index], 1.0, again=again**2)
    first, rest = type(graph)(graph.nodes[: layers[0] + 1]), graph.after(layers[0])
    second, last = type(graph)(rest.nodes[: layers[1] + 1]), rest.after(layers[1])
    margins = []
    for top, left in itertools.product(range(0, 8, pool * again), range(0, 6, pool * again)):
        lows, highs = [], []
        for i, j in itertools.product(range(again), repeat=2):
            at = (top + i * pool, left + j * pool)
            near = [p for p in corners.tolist() if all(a <= b < a + pool for a, b in zip(at, p, strict=True))]
            if not near:
                continue
            boxes = (b.flatten(0, 1) for b in threat.boxes(x, torch.tensor(near)))
            low, high = (b.unflatten(0, (5, -1)) for b in interval.output_bounds(first, *boxes, sound=False))
            low, high = interval.output_bounds(second, low.amin(1), high.amax(1), sound=False)
            lows.append(low)
            highs.append(high)
        union = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
        margins.append(interval.margin_bounds(last, *union, y, sound=False))
    assert torch.allclose(ours, torch.stack(margins).amin(0), atol=1e-5)
    proved = hf.certify(model, x, y, threat, "patch", pool=pool, pool_again=again, sound=False).margin
    assert torch.allclose(proved, ours.scatter(1, y[:, None], torch.inf).amin(1), atol=1e-5)
    once = worst_margins(graph, x, y, threat, corners[groups(threat, x, pool)], 1.0)
    assert bool((ours <= once + 1e-5).all())
    assert bool((ours < once - 1e-4).any())


def test_a_dense_first_layer_reads_only_the_columns_under_the_patch():
    model, threat = deep().eval(), hf.Patch(2, 3, low=-0.5, high=1.5)
    x, y = task()
    graph, corners = trace(model, x), threat.locations((2, 9, 7))
    shared = corners[None, :, None].expand(5, -1, 1, 2)
    apart = shared.contiguous()
    with reference():
        theirs = place_margins(graph, x, y, threat, shared, 0.7)
    assert torch.allclose(theirs, dense_margins(graph, x, y, threat, corners, 0.7), atol=1e-5)
    weights = list(model.parameters())
    slow = torch.autograd.grad(theirs.sum(), weights)
    for places in (shared, apart):
        ours = place_margins(graph, x, y, threat, places, 0.7)
        assert torch.allclose(ours, theirs, atol=1e-5)
        pairs = zip(torch.autograd.grad(ours.sum(), weights), slow, strict=True)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)
    # No other column is read: it may hold anything.
    x, _ = task(1)
    flat = torch.zeros(2, 9, 7, dtype=torch.bool)
    flat[:, 3:5, 2:5] = True
    before = local._dense_bounds(graph.nodes[2].op, x, threat, torch.tensor([[[[3, 2]]]]), 0.7)
    with torch.no_grad():
        model[1].weight[:, ~flat.flatten()] += 1.0
    after = local._dense_bounds(trace(model, x).nodes[2].op, x, threat, torch.tensor([[[[3, 2]]]]), 0.7)
    assert torch.allclose(before[1] - before[0], after[1] - after[0], atol=1e-5)


def test_pooling_gradients_are_those_of_the_pooled_loss():
    model, threat = convnet().eval(), hf.Patch(2, 2)
    x, y = task()
    loss, _ = patch(model, x, y, make_context(5, threat), places=0, pool=2)
    graph = trace(model, x)
    corners = threat.locations((2, 9, 7))[groups(threat, x, 2)]
    theirs = cross_entropy(-local.margin_bounds(graph, x, y, threat, corners.expand(5, -1, -1, 2), 1.0).amin(1), y)
    weights = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(v, weights) for v in (loss, theirs)), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_batch_norm_in_training_takes_the_statistics_of_the_clean_batch_once():
    model, threat = convnet().train(), hf.Patch(2, 2)
    x, y = task()
    before = int(model[3].num_batches_tracked)
    loss, _ = patch(model, x, y, make_context(5, threat, ramp=1e-6), places=0)
    assert int(model[3].num_batches_tracked) == before + 1
    assert loss.item() == pytest.approx(cross_entropy(model(x), y).item(), rel=1e-4)


def test_refusals():
    model = convnet().eval()
    x, y = task()
    with pytest.raises(InputError, match="set it to 0"):
        patch(model, x, y, make_context(5, hf.Patch(2, 2)), places=2, pool=2)
    with pytest.raises(InputError, match="patch:5x5"):
        patch(model, x, y, make_context(5, hf.Linf(0.1)))
    with pytest.raises(InputError, match="needs images"):
        patch(model, x.flatten(1), y, make_context(5, hf.Patch(2, 2)))
    with pytest.raises(InputError, match="does not fit"):
        patch(model, x, y, make_context(5, hf.Patch(10, 2)))
    linear = nn.Sequential(nn.Flatten(), nn.Linear(126, 4)).eval()
    with pytest.raises(UnsupportedError, match="pool"):
        patch(linear, x, y, make_context(5, hf.Patch(2, 2)), places=0, pool=2)


RECIPES = {
    "mnist-patch-2x2": {"threat": "patch:2x2", "lr": 5e-4, "epochs": 100, "end": 61.0},
    "mnist-patch-5x5": {"threat": "patch:5x5", "lr": 5e-4, "epochs": 100, "end": 61.0},
    "mnist-patch-all-2x2": {"threat": "patch:2x2", "lr": 5e-4, "epochs": 100, "end": 61.0},
    "mnist-patch-guided-2x2": {"threat": "patch:2x2", "lr": 5e-4, "epochs": 100, "end": 61.0},
    "mnist-patch-guided-5x5": {"threat": "patch:5x5", "lr": 5e-4, "epochs": 100, "end": 61.0},
    "cifar10-patch-2x2": {"threat": "patch:2x2", "lr": 1e-3, "epochs": 200, "end": 121.0},
    "cifar10-patch-5x5": {"threat": "patch:5x5", "lr": 1e-3, "epochs": 200, "end": 121.0},
}


@pytest.mark.parametrize("name", RECIPES)
def test_published_set_ups(name):
    recipe, wanted = load_recipe(name), RECIPES[name]
    assert recipe.threat == wanted["threat"]
    assert (recipe.optimizer.name, recipe.optimizer.lr, recipe.epochs) == ("adam", wanted["lr"], wanted["epochs"])
    assert recipe.budget.options["end"] == wanted["end"]
    assert recipe.learning_rate.options["gamma"] == 0.5
    assert recipe.batch_size == 256
    assert recipe.evaluate.certify == "patch"


def test_the_small_recipe_trains():
    data = hf.load_data("mnist-mini")
    few = hf.data.Dataset("mnist-mini", data.train[:70], data.test[:2], data.classes)
    changes = {"epochs": 2, "validation": 0.1, "budget": {"start": 0, "end": 1}, "evaluate": {"count": 2}}
    result = train("mnist-mini-patch", data=few, progress=False, **changes)
    row = result.history[-1]
    assert row["validation_certified"] <= row["validation_clean"]
    assert 0 <= row["train_verified"] <= row["train_accuracy"] <= 1
    assert math.isfinite(row["train_loss"])
