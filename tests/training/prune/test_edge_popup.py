"""Learned masks beside all masks there are; masks with every objective and attack; runs that stop and go on."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.errors import HoldfastError, InputError
from holdfast.models import load_model, make_model
from holdfast.models.masked import Mask, computed, fixed_weights, keep_counts, masked, patterns
from holdfast.registry import get, get_objective
from holdfast.training import load_recipe
from holdfast.training.prune.edge_popup import edge_popup

PRUNE = {"name": "edge-popup", "rate": 0.6, "gamma": 1.0}


def tiny(seed):
    """Two layers of 8 weights each, 4 of each kept: 70 * 70 masks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU(), nn.Linear(2, 4, bias=False))
    return masked(
        model, rate=0.5, gamma=1.0, weights="kaiming-constant", score_scale=0.1, last_batch_norm=False, seed=seed
    )


def best_of_all(theta, x, y):
    """The smallest loss over all masks, by enumeration."""
    first, second = theta.values()
    masks = torch.zeros(math.comb(8, 4), 8)
    for row, places in enumerate(itertools.combinations(range(8), 4)):
        masks[row, list(places)] = 1
    hidden = torch.einsum("mhd,bd->mbh", masks.view(-1, 2, 4) * first, x).relu()
    logits = torch.einsum("mbh,nkh->mnbk", hidden, masks.view(-1, 4, 2) * second)
    losses = cross_entropy(logits.flatten(0, 2), y.repeat(70 * 70), reduction="none").view(70 * 70, -1).mean(1)
    return float(losses.min()), losses


@pytest.mark.parametrize("seed", range(4))
def test_a_learned_mask_is_never_better_than_the_best_of_all_and_close_to_it(seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(40, 4, generator=generator), torch.arange(40) % 4
    x[torch.arange(40), y] += 1.5
    model = tiny(seed)
    best, losses = best_of_all(fixed_weights(model), x, y)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    found = float(cross_entropy(model(x), y).detach())
    for _ in range(150):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        found = min(found, float(loss.detach()))
        loss.backward()
        optimizer.step()
    assert [int(pattern.sum()) for pattern in patterns(model).values()] == [4, 4]
    assert found >= best - 1e-5
    assert float((losses < found - 1e-5).double().mean()) < 0.05  # among the best twentieth of all masks


@pytest.fixture(scope="module")
def few():
    data = hf.load_data("mnist-mini")
    return hf.data.Dataset(
        "few", hf.data.Split(data.train.x[:60, :, ::4, ::4].clone(), data.train.y[:60]), data.test[:4], data.classes
    )


def recipe(**changes):
    base = {
        "threat": "linf:0.05",
        "epochs": 1,
        "batch_size": 20,
        "validation": 0,
        "model": {"name": "mlp", "hidden": [12]},
        "prune": PRUNE,
        "objective": {"name": "at"},
        "optimizer": {"lr": 0.1},
        "evaluate": {"attack_steps": 0},
    }
    return base | changes


def names(part):
    return [method.name for method in hf.methods("train") if method.part == part]


THREATS = ("linf:0.05", "l2:0.1", "patch:2x2", "sparse:1")


@pytest.mark.parametrize("name", names("objective"))
def test_a_mask_is_learned_under_every_objective(name, few):
    method = get_objective(name)
    threat = next((text for text in THREATS if text.partition(":")[0] in method.threats), None)
    plan = recipe(objective={"name": name}, threat=threat, evaluate={"attack_steps": 0, "certify": "none"})
    if method.certificate and get("certify", method.certificate).needs:  # made for an architecture of its own
        with pytest.raises(HoldfastError, match=get("certify", method.certificate).needs):
            hf.train(plan, data=few, progress=False)
        return
    result = hf.train(plan, data=few, progress=False)
    assert _is_subnetwork(result.model)
    assert math.isfinite(result.history[-1]["train_loss"])


@pytest.mark.parametrize("name", names("attack"))
def test_a_mask_is_learned_with_every_attack(name, few):
    assert _is_subnetwork(hf.train(recipe(attack={"name": name}), data=few, progress=False).model)


def _is_subnetwork(model):
    """Weights as they were drawn, scores that moved, and exact counts."""
    fresh = masked(make_model("mlp", input_shape=(1, 7, 7), hidden=(12,), seed=0), rate=0.6, gamma=1.0, seed=0)
    assert all(torch.equal(w, fixed_weights(fresh)[name]) for name, w in fixed_weights(model).items())
    masks, drawn = computed(model, Mask), computed(fresh, Mask)
    assert all(not torch.equal(mask.scores, drawn[name].scores) for name, mask in masks.items())
    sizes = {name: w.numel() for name, w in fixed_weights(model).items()}
    counts = {name: int(mask.pattern().sum()) for name, mask in masks.items()}
    return counts == keep_counts(sizes, rate=0.6, gamma=1.0)


def test_a_run_that_was_stopped_ends_with_the_same_bits(few, tmp_path):
    whole = hf.train(recipe(epochs=3), data=few, progress=False, out=tmp_path / "whole")
    part = tmp_path / "part"
    hf.train(recipe(epochs=3), data=few, progress=False, out=part, epochs=2, **{"learning_rate.name": "constant"})
    resumed = hf.train(part, data=few, progress=False, out=part, resume=True, epochs=3)
    ours, theirs = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    loaded = load_model(part / "model.safetensors").state_dict()
    assert all(torch.equal(ours[key], loaded[key]) for key in ours)


def test_averages_keep_the_weights_too(few):
    for average in ({"name": "ema", "decay": 0.5}, {"name": "swa"}):
        assert _is_subnetwork(hf.train(recipe(average=average), data=few, progress=False).model)


def test_an_impossible_rate_names_the_section_and_the_layer(few):
    with pytest.raises(InputError, match=r"prune: rate 0\.995 with gamma 1 leaves no weight of layer '3'"):
        hf.train(recipe(prune={**PRUNE, "rate": 0.995}), data=few)
    with pytest.raises(InputError, match=r"prune\.gamma: expected a number between 0 and 1, got 2"):
        load_recipe(recipe(prune={**PRUNE, "gamma": 2}))
    with pytest.raises(InputError, match="prune: the model Sequential has no layer that can be masked"):
        hf.train(
            recipe(model=None),
            nn.Sequential(nn.Flatten(), nn.BatchNorm1d(49), nn.Unflatten(1, (7, 7)), nn.Flatten()),
            few,
        )


def test_robust_scratch_tickets_with_binary_weights_are_edge_popup_at_one_rate():
    base = make_model("mlp", hidden=(12,), seed=0)
    ticket = load_recipe("mnist-mini-rst").prune.options | {"weights": "binary", "rate": 0.6}
    ours = load_recipe("mnist-mini-subnet").prune.options | {"gamma": 1.0, "rate": 0.6}
    one, other = (edge_popup(base, 0, **options).state_dict() for options in (ticket, ours))
    assert all(torch.equal(one[key], other[key]) for key in one)
