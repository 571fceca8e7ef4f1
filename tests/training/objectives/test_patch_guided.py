import pytest
import torch
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.bounding.graph.trace import trace
from holdfast.data import Dataset
from holdfast.models.zoo.unet import UNet
from holdfast.random import Noise
from holdfast.training import folder as files
from holdfast.training import train
from holdfast.training.objectives import patch_guided as module
from holdfast.training.objectives.patch import patch, place_margins
from holdfast.training.objectives.patch_guided import draw_places, patch_guided, squared_error
from patch_tasks import convnet, task

SHAPE, THREAT = (2, 9, 7), hf.Patch(2, 2)
GRID = (8, 6)


def test_unet_keeps_the_size():
    for size in ((28, 28), (9, 7), (5, 4), (33, 17)):
        network = UNet(3, 7, width=4).eval()
        assert network(torch.rand(2, 3, *size)).shape == (2, 7, *size)
    count = sum(p.numel() for p in UNet(1, 10).parameters())
    # Stem, three levels of two residual blocks, laterals, decoder, branch of full size, head; counted by hand.
    stem = 49 * 10 + 20
    blocks = sum(
        9 * a * b + 9 * b * b * 3 + 8 * b + (a * b + 2 * b if a != b else 0) for a, b in ((10, 10), (10, 20), (20, 40))
    )
    laterals = sum(c * c + c for c in (10, 10, 20, 40))
    decoder = sum(9 * a * b + b for a, b in ((60, 40), (50, 20), (30, 10), (20, 10)))
    assert count == stem + blocks + laterals + decoder + (100 + 910) + 110


def test_unet_output_depends_on_the_whole_image():
    torch.manual_seed(0)
    network = UNet(1, 1).eval()
    x = torch.rand(1, 1, 28, 28, requires_grad=True)
    reach = torch.autograd.grad(network(x)[0, 0, 14, 14], x)[0]
    assert float((reach != 0).float().mean()) > 0.9


def test_places_are_distinct_for_each_class_and_in_range():
    predicted = torch.randn(6, 4, 10)
    places = draw_places(predicted, Noise.for_batch(0, 6), per_class=3, temperature=1.0).view(6, 4, 3)
    assert bool((places >= 0).all())
    assert bool((places < 10).all())
    assert all(len(set(row.tolist())) == 3 for row in places.flatten(0, 1))
    every = draw_places(predicted, Noise.for_batch(0, 6), per_class=50, temperature=1.0).view(6, 4, 10)
    assert bool((every.sort(2).values == torch.arange(10)).all())


def test_places_follow_the_softmax_of_minus_the_margins():
    margins = torch.tensor([0.5, -0.3, 0.0, 1.0])
    predicted = margins.expand(4000, 1, 4)
    places = draw_places(predicted, Noise.for_batch(1, 4000), per_class=1, temperature=2.0)
    share = torch.bincount(places.flatten(), minlength=4) / 4000
    assert torch.allclose(share, (-2.0 * margins).softmax(0), atol=0.03)
    # The second of two draws without replacement: renormalised without the first one.
    second = draw_places(predicted, Noise.for_batch(2, 4000), per_class=2, temperature=2.0)
    after_1 = second[second[:, 0] == 1, 1]
    rest = (-2.0 * margins).index_fill(0, torch.tensor(1), -torch.inf).softmax(0)
    assert torch.allclose(torch.bincount(after_1, minlength=4) / len(after_1), rest, atol=0.05)


def all_margins(model, x, y):
    corners = THREAT.locations(SHAPE)[:, None].expand(len(x), -1, 1, 2)
    return place_margins(trace(model, x), x, y, THREAT, corners, 1.0).detach()


def test_a_perfect_predictor_gives_the_loss_of_all_places(monkeypatch):
    model = convnet().eval()
    x, y = task()
    perfect = torch.zeros(5, 4, 9, 7)
    perfect[:, :, :8, :6] = all_margins(model, x, y).transpose(1, 2).unflatten(2, GRID)
    monkeypatch.setattr(module, "predict", lambda weights, x, *_: perfect + 0 * sum(w.sum() for w in weights.values()))
    strict = patch_guided(model, x, y, make_context(5, THREAT), temperature=1e7)
    loose = patch_guided(model, x, y, make_context(5, THREAT), temperature=1e-3)
    every = patch(model, x, y, make_context(5, THREAT), places=0)[0].item()
    assert strict[0].item() == pytest.approx(every, rel=1e-6)
    assert loose[0].item() < every
    assert float(strict[1]["proposal_error"]) == pytest.approx(0, abs=1e-10)


def test_the_error_reaches_the_visited_places_alone_and_not_the_margins():
    predicted = torch.randn(3, 4, 20, requires_grad=True)
    margins = torch.randn(3, 2, 4, requires_grad=True)
    places = torch.tensor([[0, 5], [7, 7], [19, 3]])
    error = squared_error(predicted, places, margins)
    assert error.item() == pytest.approx(
        sum(
            (predicted[b, j, places[b, p]] - margins[b, p, j]).item() ** 2
            for b in range(3)
            for p in range(2)
            for j in range(4)
        )
        / 24,
        rel=1e-5,
    )
    error.backward()
    assert margins.grad is None
    visited = torch.zeros(3, 20, dtype=torch.bool).scatter(1, places, True)
    assert bool((predicted.grad != 0).all(1).eq(visited).all())


def test_the_model_learns_from_the_margins_alone():
    """The gradient of the loss is that of the bounds at the proposed places; the error adds nothing to it."""
    model = convnet().eval()
    x, y = task()
    context = make_context(5, THREAT)
    loss, _ = patch_guided(model, x, y, context, per_class=2)
    ours = torch.autograd.grad(loss, list(model.parameters()))
    again = make_context(5, THREAT)
    weights = module.proposal_weights(again, x, 4, 10)
    predicted = module.predict(weights, x, 4, 10)[:, :, :8, :6].flatten(2)
    places = draw_places(predicted, again.noise, per_class=2, temperature=1.0)
    margins = all_margins_with_gradient(model, x, y, places)
    theirs = torch.autograd.grad(cross_entropy(-margins, y), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def all_margins_with_gradient(model, x, y, places):
    corners = THREAT.locations(SHAPE)[places][:, :, None]
    return place_margins(trace(model, x), x, y, THREAT, corners, 1.0).amin(1)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_proposal_is_trained_by_adam_in_the_state(batch):
    model = convnet().eval()
    x, y = task(batch)
    context = make_context(batch, THREAT)
    weights = module.proposal_weights(context, x, 4, 10)
    before = {name: value.detach().clone() for name, value in weights.items()}
    network = UNet(2, 4).train(batch > 1)
    network.load_state_dict(before)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)  # the learning rate of the context
    for _ in range(3):
        _, metrics = patch_guided(model, x, y, context)
        predicted = network(x)[:, :, :8, :6].flatten(2)
        places = draw_places(predicted, context.noise, per_class=1, temperature=1.0)
        corners = THREAT.locations(SHAPE)[places][:, :, None]
        margins = place_margins(trace(model, x), x, y, THREAT, corners, 1.0)
        error = squared_error(predicted, places, margins)
        assert float(metrics["proposal_error"]) == pytest.approx(error.item(), rel=1e-3)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    for name, value in network.state_dict().items():
        assert torch.allclose(context.state[module.WEIGHT + name], value, atol=1e-3), name
    assert int(context.state[module.STEPS]) == 3
    assert not torch.equal(context.state[module.WEIGHT + "head.weight"], before["head.weight"])


def test_the_prediction_improves():
    model = convnet().eval()
    x, y = task(16)
    context = make_context(16, THREAT)
    context.optimizer.param_groups[0]["lr"] = 5e-3
    errors = [float(patch_guided(model, x, y, context, per_class=4)[1]["proposal_error"]) for _ in range(25)]
    assert sum(errors[-3:]) < 0.7 * sum(errors[:3])


SET_UP = {
    "threat": "patch:2x2",
    "epochs": 2,
    "batch_size": 16,
    "validation": 0.2,
    "objective": {"name": "patch-guided", "width": 4},
    "optimizer": {"name": "adam", "lr": 1e-3},
    "budget": {"name": "linear", "end": 1},
    "evaluate": {"attack_steps": 0},
}


def test_a_resumed_run_gives_the_same_weights(toy_data, make_toy_model, tmp_path):
    whole = train(SET_UP, make_toy_model(), toy_data, out=tmp_path / "whole", progress=False)
    train(SET_UP, make_toy_model(), toy_data, out=tmp_path / "parts", progress=False, epochs=1)
    parts = train(SET_UP, make_toy_model(), toy_data, out=tmp_path / "parts", progress=False, resume=True)
    last = [torch.load(tmp_path / run / files.LAST, weights_only=True) for run in ("whole", "parts")]
    for part in ("model", "objective"):
        assert set(last[0][part]) == set(last[1][part])
        assert all(torch.equal(last[0][part][key], last[1][part][key]) for key in last[0][part])
    assert any(key.startswith(module.MEAN) for key in last[0]["objective"])
    assert [row["train_loss"] for row in whole.history] == [row["train_loss"] for row in parts.history]


def test_the_small_recipe_trains():
    data = hf.load_data("mnist-mini")
    few = Dataset("mnist-mini", data.train[:50], data.test[:2], data.classes)
    changes = {"epochs": 2, "validation": 0.1, "budget": {"start": 0, "end": 1}, "evaluate": {"count": 1}}
    row = train("mnist-mini-patch-guided", data=few, progress=False, **changes).history[-1]
    assert row["train_proposal_error"] >= 0
    assert 0 <= row["validation_certified"] <= row["validation_clean"]


def test_the_rate_of_the_u_net_is_a_multiple_of_the_models():
    model = convnet().eval()
    x, y = task()
    moved = {}
    for rate in (1.0, 0.25):
        context = make_context(5, THREAT)
        module.proposal_weights(context, x, 4, 10)
        before = {key: value.clone() for key, value in context.state.items() if key.startswith(module.WEIGHT + "head")}
        patch_guided(model, x, y, context, rate=rate)
        moved[rate] = torch.cat([(context.state[key] - value).flatten() for key, value in before.items()])
    # The first step of Adam has the length of its learning rate in every weight that has a gradient.
    assert torch.allclose(moved[0.25], 0.25 * moved[1.0], rtol=1e-3, atol=1e-7)
    assert float(moved[1.0].abs().max()) > 0
