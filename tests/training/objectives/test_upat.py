"""Universal pyramid adversarial training: free gradients, closed form, and the run of plain training within it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast import InputError
from holdfast.training import train
from holdfast.training.objectives.pat import pat
from holdfast.training.objectives.upat import upat


class Counted(nn.Module):
    """A network that counts its passes, per example, forward and backward."""

    def __init__(self, body):
        super().__init__()
        self.body, self.forwards, self.backwards = body, 0, 0

    def forward(self, x):
        self.forwards += len(x)
        out = self.body(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: setattr(self, "backwards", self.backwards + len(gradient)))
        return out


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.rand(6, 1, 4, 6, dtype=torch.float64), torch.arange(6) % 3


SMALL = {"levels": (2, 1), "multipliers": (5.0, 1.0), "radius": 0.1}


def slow_update(model, x, y, levels, tau, radius):
    """The step of one pattern, by autograd through the definition."""
    levels = [level.clone().requires_grad_(True) for level in levels]
    delta = 5 * levels[0].repeat_interleave(2, 1).repeat_interleave(2, 2) + levels[1]
    loss = cross_entropy(model(x), y) + cross_entropy(model(x + delta), y)
    weights = list(model.parameters())
    found = torch.autograd.grad(loss, [*weights, *levels])
    moved = [
        (v + tau * g.sign()).clamp(-radius, radius).detach() for v, g in zip(levels, found[len(weights) :], strict=True)
    ]
    return loss, found[: len(weights)], moved


def test_each_step_is_the_reference_loop(problem):
    model, x, y = problem
    state: dict[str, torch.Tensor] = {}
    levels = [torch.zeros(1, 2, 3, dtype=torch.float64), torch.zeros(1, 4, 6, dtype=torch.float64)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        expected, gradients, levels = slow_update(model, x, y, levels, 0.04, 0.1)
        optimizer.zero_grad()
        loss, metrics = upat(model, x, y, make_context(x, state=state), step=0.4, **SMALL)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.allclose(parameter.grad, gradient)
        optimizer.step()
        assert torch.allclose(state["pyramid_2"][0], levels[0])
        assert torch.allclose(state["pyramid_1"][0], levels[1])
        assert metrics["clean_accuracy"] >= 0


def test_one_backward_pass_serves_weights_and_perturbation(problem):
    model, x, y = problem
    for weight, clean_weight, passes in ((1.0, 1.0, 2), (1.0, 0.0, 1), (0.0, 1.0, 1)):
        counted = Counted(model)
        loss, _ = upat(counted, x, y, make_context(x), weight=weight, clean_weight=clean_weight, **SMALL)
        assert (counted.forwards, counted.backwards) == (passes * len(x), 0)
        loss.backward()
        assert (counted.forwards, counted.backwards) == (passes * len(x), passes * len(x))
    for steps in (1, 3):
        counted = Counted(model)
        pat(counted, x, y, make_context(x), steps=steps, **SMALL)[0].backward()
        assert (counted.forwards, counted.backwards) == ((steps + 2) * len(x),) * 2


def test_a_frozen_linear_model_gives_the_sign_pattern():
    """Margins of a linear model of two classes fall fastest along the sum of w_other - w_y, of each tile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 2)).double()
    x, y = torch.rand(5, 1, 4, 6, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    direction = (model[1].weight[1] - model[1].weight[0]).detach().view(4, 6)
    state: dict[str, torch.Tensor] = {}
    for _ in range(6):  # five steps of a fifth of the radius, and one at the edge
        upat(model, x, y, make_context(x, state=state), step=0.2, **SMALL)[0].backward()
    tiles = direction.view(2, 2, 3, 2).sum((1, 3))
    assert torch.allclose(state["pyramid_1"][0, 0], 0.1 * direction.sign())
    assert torch.allclose(state["pyramid_2"][0, 0], 0.1 * tiles.sign())


@pytest.mark.parametrize("name", ["upat", "pat"])
def test_without_the_adversarial_term_it_is_plain_training_bit_for_bit(name, toy_recipe, make_toy_model, toy_data):
    toy_recipe |= {"attack": None, "augment": {"crop": 1, "flip": True}}
    plain, same, other = (
        train({**toy_recipe, "objective": choice}, make_toy_model(), toy_data, progress=False).model.state_dict()
        for choice in ({"name": "standard"}, {"name": name, "weight": 0.0}, {"name": name})
    )
    assert all(torch.equal(plain[key], same[key]) for key in plain)
    assert not all(torch.equal(plain[key], other[key]) for key in plain)


@pytest.mark.parametrize("patterns", [1, 3, "per-slot"])
def test_a_resumed_run_has_the_same_bits(patterns, toy_recipe, make_toy_model, toy_data, tmp_path):
    objective = {"name": "upat", "patterns": patterns, "decay_start": 1, "decay_end": 3}
    toy_recipe |= {"attack": None, "objective": objective}
    whole = train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "whole", progress=False)
    train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "part", epochs=2, progress=False)
    train(toy_recipe, make_toy_model(), toy_data, out=tmp_path / "part", resume=True, progress=False)
    last = [torch.load(tmp_path / run / "checkpoints" / "last.pt", weights_only=True) for run in ("whole", "part")]
    assert whole.history[-1]["train_loss"] > 0
    for part in ("model", "objective"):
        assert last[0][part].keys() == last[1][part].keys()
        assert all(torch.equal(last[0][part][key], last[1][part][key]) for key in last[0][part])
    delta = last[0]["objective"]["pyramid_1"]
    assert len(delta) == {1: 1, 3: 3, "per-slot": 16}[patterns]
    assert 0 < delta.abs().max() <= 8 / 255 * 0.1 + 1e-8  # after epoch 3 the radius is a tenth: projected anew


def test_patterns_belong_to_places_in_the_batch(problem):
    model, x, y = problem
    state: dict[str, torch.Tensor] = {}
    upat(model, x, y, make_context(x, state=state, count=12), patterns="per-slot", **SMALL)[0].backward()
    assert state["pyramid_1"].shape == (6, 1, 4, 6)
    kept = state["pyramid_1"].clone()
    loss = upat(model, x[:2], y[:2], make_context(x[:2], state=state), patterns="per-slot", **SMALL)[0]
    expected = cross_entropy(model(x[:2]), y[:2])
    delta = 5 * state["pyramid_2"].repeat_interleave(2, 2).repeat_interleave(2, 3) + kept
    assert loss.item() == pytest.approx((expected + cross_entropy(model(x[:2] + delta[:2]), y[:2])).item())
    loss.backward()
    assert torch.equal(state["pyramid_1"][2:], kept[2:])
    assert not torch.equal(state["pyramid_1"][:2], kept[:2])
    larger = torch.cat([x, x])
    upat(model, larger, y.repeat(2), make_context(larger, state=state), patterns="per-slot", **SMALL)[0].backward()
    assert state["pyramid_1"].shape == (12, 1, 4, 6)


@pytest.mark.parametrize(("objective", "options"), [(upat, {}), (pat, {"steps": 1})])
def test_both_weights_count(objective, options, problem):
    model, x, y = problem
    given = {**SMALL, **options}
    terms = [objective(model, x, y, make_context(x), **given, weight=w, clean_weight=c)[0] for w, c in ((1, 0), (0, 1))]
    loss, _ = objective(model, x, y, make_context(x), **given, weight=0.3, clean_weight=0.6)
    assert loss.item() == pytest.approx(0.3 * terms[0].item() + 0.6 * terms[1].item())


def test_a_radius_that_shrank_binds_the_levels_before_they_are_used(problem):
    model, x, y = problem
    seen = []
    watched = nn.Sequential(model)
    watched.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    state = {"pyramid_1": torch.full((1, 1, 4, 6), 0.5, dtype=torch.float64)}
    flat = {"levels": (1,), "multipliers": (1.0,), "radius": 0.5, "clean_weight": 0.0}
    upat(watched, x, y, make_context(x, state=state, epoch=9), **flat, decay_start=0, decay_end=4)
    assert torch.allclose(seen[0], x + 0.05)


def test_no_pyramid_and_clipping_are_configurations(problem):
    model, x, y = problem
    seen = []
    watched = nn.Sequential(model)
    watched.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    state = {"pyramid_1": torch.full((1, 1, 4, 6), 0.5, dtype=torch.float64)}
    flat = {"levels": (1,), "multipliers": (1.0,), "radius": 0.5, "clean_weight": 0.0}
    for clip in (False, True):
        upat(watched, x, y, make_context(x, state=dict(state)), clip_input=clip, **flat)
    assert torch.equal(seen[0], x + 0.5)
    assert torch.equal(seen[1], (x + 0.5).clamp(0, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": 0}, r"objective.radius: expected a number > 0, got 0"),
        ({"levels": [3], "multipliers": [1.0]}, "tiles of 3 x 3 do not divide an image of 5 x 4"),
        ({"weight": 0, "clean_weight": 0}, "no loss is left"),
        ({"patterns": 0}, "objective.patterns"),
        ({"decay_start": 5, "decay_end": 5}, "objective.decay_end: expected an epoch after decay_start = 5, got 5"),
        ({"multipliers": [1.0]}, "objective.multipliers: needs objective.levels"),
    ],
)
@pytest.mark.parametrize("name", ["upat", "pat"])
def test_bad_options_are_refused_before_the_run_leaves_a_trace(
    name, options, message, toy_recipe, make_toy_model, toy_data, tmp_path
):
    if name == "pat" and "patterns" in options:
        message = "patterns"
    recipe = {**toy_recipe, "attack": None, "objective": {"name": name, **options}}
    with pytest.raises(InputError, match=message):
        train(recipe, make_toy_model(), toy_data, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
