"""Fast adversarial training: gradients that serve twice, and the collapse that it is prone to."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast import L1, L2, Linf
from holdfast.registry import Objective, get, methods
from holdfast.training import load_recipe, loop, train
from holdfast.training.collapse import CollapseWarning, collapsed, warn_of_collapse
from holdfast.training.objectives.free import free
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.yopo import yopo

THREATS = {"linf": Linf(0.1), "l2": L2(0.2), "l1": L1(0.3)}


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.rand(6, 4, dtype=torch.float64), torch.arange(6) % 3


def gradients(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def input_gradient(model, x, y):
    point = x.detach().clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(cross_entropy(model(point), y), point)
    return gradient


# -- Free adversarial training --


@pytest.mark.parametrize(("replays", "steps"), [(1, 4), (3, 12)])
def test_free_takes_one_step_for_each_replay_of_a_batch(toy_recipe, make_toy_model, toy_data, tmp_path, replays, steps):
    recipe = {**toy_recipe, "attack": None, "objective": {"name": "free", "replays": replays}, "epochs": 1}
    recipe["optimizer"] = {"name": "adam", "lr": 1e-3}
    train(recipe, make_toy_model(), toy_data, out=tmp_path / "run")
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert {int(state["step"]) for state in saved["optimizer"]["state"].values()} == {steps}  # 56 images in fours
    assert saved["model"]["2.num_batches_tracked"] == steps  # and one pass for each of them
    assert saved["objective"]["delta"].shape == (16, 1, 5, 4)


def test_replays_of_a_batch_follow_each_other(toy_recipe, make_toy_model, toy_data, monkeypatch):
    seen = []
    make_batch = loop.make_batch

    def watch(task, run, index, batches):
        seen.append(index.tolist())
        return make_batch(task, run, index, batches)

    monkeypatch.setattr(loop, "make_batch", watch)
    recipe = {**toy_recipe, "attack": None, "objective": {"name": "free", "replays": 2}, "epochs": 1}
    train(recipe, make_toy_model(), toy_data)
    assert seen[0::2] == seen[1::2]
    assert sorted(i for batch in seen[0::2] for i in batch) == list(range(56))


def test_free_moves_delta_by_the_gradient_of_the_same_pass(problem):
    model, x, y = problem
    state: dict[str, torch.Tensor] = {}
    delta = torch.zeros_like(x)
    for _ in range(3):
        loss, _ = free(model, x, y, make_context(x, Linf(0.1), state=state), step=0.4)
        x_adv = (x + delta).clamp(0, 1)
        assert loss.item() == pytest.approx(cross_entropy(model(x_adv), y).item())
        expected = gradients(cross_entropy(model(x_adv), y), model)
        before = state["delta"].clone()
        found = gradients(loss, model)
        assert torch.allclose(found, expected)
        assert torch.equal(before, state["delta"])  # only a gradient for the input moves it: the loop's backward pass
        loss, _ = free(model, x, y, make_context(x, Linf(0.1), state=state), step=0.4)
        loss.backward()
        model.zero_grad()
        delta = (delta + 0.04 * input_gradient(model, x_adv, y).sign()).clamp(-0.1, 0.1)
        delta = (x + delta).clamp(0, 1) - x
        assert torch.allclose(state["delta"], delta)


@pytest.mark.parametrize("norm", THREATS)
def test_free_stays_in_the_budget_in_every_norm(problem, norm):
    model, x, y = problem
    threat, state = THREATS[norm], {}
    for turn in range(5):
        loss, _ = free(model, x, y, make_context(x, threat, state=state))
        loss.backward()
        assert threat.contains(threat.clip(x + state["delta"]), x).all()
        other = torch.rand_like(x)  # the next batch gets the same delta, and stays in range
        loss, _ = free(model, other, y, make_context(x, threat, state={"delta": state["delta"].clone()}))
        assert torch.isfinite(loss)
        assert turn == 0 or state["delta"].abs().max() > 0
    half, _ = free(model, x[:2], y[:2], make_context(x[:2], threat, state=state))
    kept = state["delta"].clone()
    half.backward()
    assert torch.equal(state["delta"][2:], kept[2:])


# -- YOPO --


def by_hand(model, x, y, threat, noise, *, rounds, updates, step):
    """The points that are visited: `updates` steps along one direction between full passes."""
    point = threat.random_start(x, noise)
    visited = [point]
    for _ in range(rounds - 1):
        direction = input_gradient(model, point, y)
        for _ in range(updates):
            point = threat.project(point + step * threat.budget * direction.sign(), x)
        visited.append(point)
    return visited


def test_yopo_gradient_is_the_mean_over_the_points_visited(problem):
    model, x, y = problem
    context = make_context(x, Linf(0.1))
    loss, _ = yopo(model, x, y, context, rounds=4, updates=2, step=0.3)
    visited = by_hand(model, x, y, Linf(0.1), context.noise, rounds=4, updates=2, step=0.3)
    losses = [cross_entropy(model(point), y) for point in visited]
    assert loss.item() == pytest.approx(losses[-1].item())
    expected = torch.stack([gradients(value, model) for value in losses]).mean(0)
    assert torch.allclose(gradients(loss, model), expected)
    assert losses[-1] > losses[0]
    assert all(p.grad is None for p in model.parameters())


def test_yopo_of_one_round_trains_on_random_points(problem):
    model, x, y = problem
    context = make_context(x, Linf(0.1))
    loss, _ = yopo(model, x, y, context, rounds=1, updates=3)
    expected = cross_entropy(model(Linf(0.1).random_start(x, context.noise)), y)
    assert loss.item() == pytest.approx(expected.item())
    assert torch.allclose(gradients(loss, model), gradients(expected, model))


def test_yopo_with_parameters_that_do_not_take_part(problem):
    model, x, y = problem
    model[0].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    loss, _ = yopo(model, x, y, make_context(x, Linf(0.1)), rounds=3)
    loss.backward()
    assert model[0].bias.grad is None
    assert model.unused.grad is None or not model.unused.grad.any()
    assert model[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize("norm", THREATS)
def test_yopo_in_every_norm(problem, norm):
    model, x, y = problem
    seen = []
    handle = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    yopo(model, x, y, make_context(x, THREATS[norm]), rounds=4)
    handle.remove()
    assert len(seen) == 4
    assert all(THREATS[norm].contains(point, x).all() for point in seen)


@pytest.mark.parametrize("objective", [free, yopo])
@pytest.mark.parametrize("threat", [Linf(0.0), L2(0.0)])
def test_without_a_budget_they_are_plain_training(problem, objective, threat):
    model, x, y = problem
    loss, metrics = objective(model, x, y, make_context(x, threat))
    expected, plain = standard(model, x, y, make_context(x, threat))
    assert loss.item() == pytest.approx(expected.item())
    assert float(metrics["accuracy"]) == pytest.approx(float(plain["accuracy"]))
    assert torch.allclose(gradients(loss, model), gradients(expected, model))


@pytest.mark.parametrize("name", ["free", "yopo"])
def test_fast_objectives_learn(toy_recipe, make_toy_model, toy_data, name):
    recipe = {**toy_recipe, "attack": None, "objective": {"name": name}, "epochs": 3}
    history = train(recipe, make_toy_model(), toy_data).history
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert history[-1]["validation_robust"] > 0.8


# -- The collapse --


@pytest.mark.parametrize(
    ("single", "robust", "before", "expected"),
    [
        (0.9, 0.02, [0.3, 0.45, 0.4], True),
        (0.52, 0.2, [0.4], True),  # half of the best is enough
        (0.52, 0.21, [0.4], False),  # and a little above it is not
        (0.5, 0.2, [0.4], False),  # a gap of 0.3 is not more than 0.3
        (0.9, 0.02, [], False),  # nothing to fall from
        (0.1, 0.0, [0.5], False),  # bad, but not single-step training gone wrong
        (0.55, 0.45, [0.46], False),
    ],
)
def test_detector_on_single_epochs(single, robust, before, expected):
    assert collapsed(single, robust, before) is expected


LOG = [(0.4, 0.3), (0.5, 0.38), (0.55, 0.4), (0.9, 0.01), (0.95, 0.0), (0.5, 0.35)]


def test_detector_on_a_log_warns_once():
    history = []
    for epoch, (single, robust) in enumerate(LOG, 1):
        row = {"epoch": epoch, "validation_single": single, "validation_robust": robust}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row["collapsed"] = warn_of_collapse(row, history)
        assert len(caught) == (1 if epoch == 4 else 0)
        history.append(row)
    assert [row["collapsed"] for row in history] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_a_run_that_collapses_says_so_once_and_keeps_the_column(toy_recipe, make_toy_model, toy_data, monkeypatch):
    log = iter(LOG)

    def evaluate(*arguments, single_step, **options):
        assert single_step
        single, robust = next(log)
        return {"clean": 0.9, "robust": robust, "single": single}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    toy_recipe |= {"attack": {"name": "fgsm-rs"}, "epochs": 6}
    with pytest.warns(CollapseWarning, match=r"in epoch 4: accuracy under one step 90\.0%, under PGD 1\.0%") as caught:
        result = train(toy_recipe, make_toy_model(), toy_data)
    assert len(caught) == 1
    assert [row["collapsed"] for row in result.history] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert [row["validation_single"] for row in result.history] == [single for single, _ in LOG]


SINGLE = [method for method in methods("train") if method.single_step]


@pytest.mark.parametrize("method", [*SINGLE, get("train", "pgd")], ids=lambda method: method.name)
def test_which_runs_are_watched(toy_recipe, make_toy_model, toy_data, method):
    parts = {"objective": {"name": "at"}, "attack": {"name": method.name}}
    if isinstance(method, Objective):
        parts = {"objective": {"name": method.name}, "attack": None}
    recipe = {**toy_recipe, **parts, "epochs": 1}
    assert load_recipe(recipe).single_step == method.single_step
    (row,) = train(recipe, make_toy_model(), toy_data).history
    assert ("collapsed" in row) == ("validation_single" in row) == method.single_step
    if method.single_step:
        assert row["collapsed"] == 0.0
        assert row["validation_robust"] <= row["validation_clean"]
        assert row["validation_single"] <= row["validation_clean"]
