"""Free adversarial training: gradients that serve twice."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast import Linf
from holdfast.training import loop, train
from holdfast.training.objectives.free import free
from paired_tasks import THREATS, gradients, input_gradient


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.rand(6, 4, dtype=torch.float64), torch.arange(6) % 3


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
