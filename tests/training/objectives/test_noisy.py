"""Objectives for smoothed classifiers: each loss against its formula, written out, with the same noise."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

import holdfast as hf
from contexts import make_context
from holdfast.random import Noise
from holdfast.training import load_recipe, train
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Parts
from holdfast.training.objectives.ablation import ablated_view, ablation
from holdfast.training.objectives.consistency import consistency
from holdfast.training.objectives.core.smoothed import draw, noisy_view
from holdfast.training.objectives.gaussian import gaussian
from holdfast.training.objectives.macer import macer
from holdfast.training.objectives.smoothadv import SoftVote, smoothadv


def net(seed=0, inputs=12, classes=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, classes))


def task(count=5, seed=1):
    torch.manual_seed(seed)
    return torch.rand(count, 1, 3, 4), torch.arange(count) % 4


def noisy_logits(model, x, sigma, samples, seed=0):
    """(B, m, K), one sample after the other."""
    shift = draw(x, Noise(seed, torch.arange(len(x))), sigma, samples)
    return torch.stack([model(x + shift[:, i]) for i in range(samples)], 1)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("count", [1, 5])
def test_gaussian_is_the_cross_entropy_under_noise(samples, count):
    model, (x, y) = net(), task(count)
    loss, metrics = gaussian(model, x, y, make_context(x), sigma=0.5, samples=samples)
    logits = noisy_logits(model, x, 0.5, samples)
    expected = sum(cross_entropy(logits[:, i], y) for i in range(samples)) / samples
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx((logits.argmax(2) == y[:, None]).float().mean().item())
    loss.backward()
    assert model[1].weight.grad.abs().sum() > 0


def test_consistency_adds_divergence_and_entropy():
    model, (x, y) = net(), task()
    loss, metrics = consistency(model, x, y, make_context(x), sigma=0.8, samples=3, weight=7.0, entropy_weight=0.4)
    logits = noisy_logits(model, x, 0.8, 3)
    each = logits.softmax(2)
    mean = each.mean(1)
    divergence = sum(kl_div(each[:, i].log(), mean, reduction="batchmean") for i in range(3)) / 3
    entropy = -(mean * mean.log()).sum(1).mean()
    fit = cross_entropy(logits.flatten(0, 1), y.repeat_interleave(3))
    assert loss.item() == pytest.approx((fit + 7 * divergence + 0.4 * entropy).item(), rel=1e-5)
    assert float(metrics["divergence"]) == pytest.approx(divergence.item(), rel=1e-4)
    assert float(metrics["entropy"]) == pytest.approx(entropy.item(), rel=1e-4)


def test_one_sample_agrees_with_itself():
    model, (x, y) = net(), task()
    _, metrics = consistency(model, x, y, make_context(x), samples=1)
    assert float(metrics["divergence"]) == pytest.approx(0.0, abs=1e-6)


def test_macer_is_a_hinge_on_the_radius_of_what_is_right():
    model, (x, y) = net(3), task(40)
    y = model(x).argmax(1).where(torch.arange(40) % 4 > 0, y)  # most of them right
    options = {"sigma": 0.3, "samples": 6, "weight": 5.0, "gamma": 1.5, "beta": 4.0}
    loss, metrics = macer(model, x, y, make_context(x), **options)
    logits = noisy_logits(model, x, 0.3, 6)
    fit = -logits.softmax(2).mean(1).gather(1, y[:, None]).log().mean()
    t = (4 * logits).softmax(2).mean(1).double()
    total, counted = 0.0, 0
    for row, label in zip(t.tolist(), y.tolist(), strict=True):
        others = max(p for j, p in enumerate(row) if j != label)
        if row[label] > others:
            normal = torch.distributions.Normal(0.0, 1.0)
            room = float(normal.icdf(torch.tensor(row[label])) - normal.icdf(torch.tensor(others)))
            total += max(0.0, 1.5 - room)
            counted += room < 1.5
    assert 0 < counted < 40
    assert loss.item() == pytest.approx(fit.item() + 5 * 0.3 / 2 * total / 40, rel=1e-4)
    assert float(metrics["hinge"]) == pytest.approx(total / 40, rel=1e-3)


def test_macer_stays_finite_where_the_vote_is_unanimous():
    model, (x, y) = net(), task()
    with torch.no_grad():
        model[3].bias[0] += 1000.0
    loss, metrics = macer(model, x, torch.zeros_like(y), make_context(x))
    loss.backward()
    assert math.isfinite(loss.item())
    assert float(metrics["hinge"]) == 0.0
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_smoothadv_attacks_the_soft_vote_with_the_noise_of_its_loss():
    model, (x, y), threat = net(), task(), hf.L2(0.6)
    found = []

    def attack(attacked, x, y, loss, context):
        found.append((attacked, loss(attacked(x), y)))
        return (x + 0.1).clamp(0, 1)

    loss, _ = smoothadv(model, x, y, make_context(x, threat, Parts(attack=attack)), sigma=0.5, samples=3)
    (attacked, value), logits = found[0], noisy_logits(model, x, 0.5, 3)
    soft = -logits.softmax(2).mean(1).gather(1, y[:, None])[:, 0].log()
    assert torch.allclose(value, soft, atol=1e-5)
    moved = (x + 0.1).clamp(0, 1)
    assert torch.allclose(attacked(moved), noisy_logits(model, moved, 0.5, 3).softmax(2).mean(1).log(), atol=1e-5)
    shift = draw(x, Noise(0, torch.arange(5)), 0.5, 3)
    expected = cross_entropy(model((moved[:, None] + shift).flatten(0, 1)), y.repeat_interleave(3))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_smoothadv_finds_inputs_of_higher_loss_inside_the_ball():
    model, (x, y), threat = net(), task(30), hf.L2(0.6)
    context = make_context(x, threat)
    vote = SoftVote(model, draw(x, context.noise, 0.3, 4))
    x_adv = pgd(vote, x, y, lambda z, y: cross_entropy(z, y, reduction="none"), context, steps=5)
    assert bool(threat.contains(x_adv, x).all())
    assert cross_entropy(vote(x_adv), y) > cross_entropy(vote(x), y) + 0.05
    adversarial, plain = (f(model, x, y, context, sigma=0.3, samples=4)[0].item() for f in (smoothadv, gaussian))
    assert adversarial > plain
    none = smoothadv(model, x, y, make_context(x, hf.L2(0.0)), sigma=0.3, samples=4)[0]
    assert none.item() == pytest.approx(plain, rel=1e-5)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("part", "size", "kept"), [("column", 2, 2 * 3), ("row", 1, 1 * 4), ("block", 2, 4), ("pixels", 5, 5)]
)
def test_ablation_keeps_a_part_of_each_input(part, size, kept):
    x, noise = torch.rand(300, 2, 3, 4) * 0.4, Noise.for_batch(0, 300)
    seen = ablated_view(x, noise, part=part, size=size, null=0.9)
    mask = seen != 0.9
    assert bool((mask.all(1) == mask.any(1)).all())
    mask = mask[:, 0]
    assert bool((mask.flatten(1).sum(1) == kept).all())
    assert torch.equal(seen[mask[:, None].expand_as(x)], x[mask[:, None].expand_as(x)])
    assert float((mask.float().mean(0) - kept / 12).abs().max()) < 0.12  # every pixel is seen equally often
    if part == "column":
        assert bool((mask.any(1).sum(1) == 2).all())
        assert bool((mask[:, :, 0] & mask[:, :, -1]).any())  # around the edge
    model, y = net(inputs=24), torch.zeros(300, dtype=torch.int64)
    loss, metrics = ablation(model, x, y, make_context(x), part=part, size=size, null=0.9)
    assert loss.item() == pytest.approx(cross_entropy(model(seen), y).item(), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx((model(seen).argmax(1) == y).float().mean().item())


def test_vectors_have_pixels_but_no_columns():
    x = torch.rand(4, 6)
    assert (ablated_view(x, Noise.for_batch(0, 4), part="pixels", size=2, null=-1.0) != -1).sum(1).tolist() == [2] * 4
    with pytest.raises(hf.InputError, match="images"):
        ablated_view(x, Noise.for_batch(0, 4), part="column", size=2, null=0.5)


def test_noise_belongs_to_the_example():
    x = torch.rand(6, 1, 3, 4)
    noise = Noise(3, torch.arange(6))
    assert torch.equal(noisy_view(x, noise, sigma=0.2, samples=4)[2:4], noisy_view(x[2:4], noise[2:4], sigma=0.2))
    assert noisy_view(x, noise, sigma=2.0).sub(x).std().item() == pytest.approx(2.0, rel=0.3)
    assert noisy_view(x[:0], noise[:0], sigma=1.0).shape == (0, 1, 3, 4)


RECIPE = {
    "threat": "l2:0.2",
    "epochs": 2,
    "batch_size": 16,
    "validation": 0.2,
    "optimizer": {"name": "sgd", "lr": 0.1},
    "evaluate": {"attack_steps": 0},
}


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "gaussian", "sigma": 0.1},
        {"name": "smoothadv", "sigma": 0.1},
        {"name": "consistency", "sigma": 0.1},
        {"name": "macer", "sigma": 0.1, "samples": 4},
        {"name": "ablation", "part": "column", "size": 2},
    ],
)
def test_a_run_validates_what_the_smoothed_classifier_sees(objective, make_toy_model, toy_data):
    first, again = (
        train({**RECIPE, "objective": objective}, make_toy_model(), toy_data, progress=False) for _ in range(2)
    )
    assert load_recipe({**RECIPE, "objective": objective}).selects == "noisy"
    for row, same in zip(first.history, again.history, strict=True):
        assert row["validation_noisy"] == same["validation_noisy"]
        assert row["train_loss"] == same["train_loss"]
        assert "validation_robust" not in row
    assert first.history[-1]["validation_noisy"] > 0.4


def test_other_objectives_have_no_noisy_accuracy(toy_recipe, make_toy_model, toy_data):
    assert "validation_noisy" not in train(toy_recipe, make_toy_model(), toy_data, epochs=1, progress=False).history[0]
    with pytest.raises(hf.InputError, match=r"evaluate\.select: 'noisy' needs an objective"):
        load_recipe(toy_recipe, {"evaluate.select": "noisy"})


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"name": "gaussian", "sigma": 0.0}, "objective.sigma: expected a number > 0"),
        ({"name": "gaussian", "samples": 0}, "objective.samples: expected an integer >= 1"),
        ({"name": "consistency", "weight": -1.0}, "objective.weight: expected a number >= 0"),
        ({"name": "ablation", "part": "circle"}, "objective.part: unknown value 'circle'"),
    ],
)
def test_options_out_of_range_are_refused(objective, message):
    with pytest.raises(hf.InputError) as error:
        load_recipe({**RECIPE, "objective": objective})
    assert message in str(error.value)


def test_smoothadv_needs_an_l2_ball():
    with pytest.raises(hf.UnsupportedError, match="'smoothadv' does not handle the threat 'linf"):
        load_recipe({**RECIPE, "threat": "linf:0.1", "objective": {"name": "smoothadv"}})
