"""What outputs are compared with: softened and learned targets, weights, and how the loss is made of them."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from contexts import make_context
from holdfast import Linf
from holdfast.training import train
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Parts
from holdfast.training.objectives.at import at
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.trades import trades
from holdfast.training.outputs import Output
from holdfast.training.step import Target, divergence
from holdfast.training.targets import adaptive, geometry, self_adaptive, smooth

Y = torch.tensor([0, 2, 1, 1])
LABELS = one_hot(Y, 3).double()


def outputs(seed, count=4):
    torch.manual_seed(seed)
    return Output(torch.randn(count, 3, dtype=torch.float64, requires_grad=True))


def make_plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 2))


def same_weights(a, b, tolerance=0.0):
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return all(torch.allclose(p, q, rtol=0, atol=tolerance) for p, q in pairs)


# -- Label smoothing --


def test_smooth_by_hand():
    target = smooth(None, outputs(0), Y, make_context(4), amount=0.3)
    assert torch.allclose(target.value, torch.where(LABELS == 1, 0.8, 0.1).double())
    assert target.weight is None
    assert torch.equal(smooth(None, outputs(0), Y, make_context(4), amount=0.0).value, LABELS)


def test_smooth_targets_reach_the_loss():
    model, x = nn.Linear(5, 3).double(), torch.rand(4, 5, dtype=torch.float64)
    loss, _ = standard(model, x, Y, make_context(4, parts=Parts(targets=partial(smooth, amount=0.3))))
    assert loss.item() == pytest.approx(cross_entropy(model(x), Y, label_smoothing=0.3).item())


# -- Self-adaptive training --


def test_self_adaptive_targets_move_towards_the_clean_output():
    clean, adv, state = outputs(1), outputs(2), {}
    for epoch in (0, 1):
        before = self_adaptive(clean, adv, Y, make_context(4, epoch=epoch, state=state), momentum=0.7, start=2)
        assert torch.equal(before.value, LABELS)
        assert torch.equal(before.weight, torch.ones(4, dtype=torch.float64))
    expected = LABELS
    for epoch in (2, 3):
        expected = 0.7 * expected + 0.3 * clean.logits.softmax(1)
        target = self_adaptive(clean, adv, Y, make_context(4, epoch=epoch, state=state), momentum=0.7, start=2)
        assert torch.allclose(target.value, expected)
        assert torch.allclose(target.weight, expected.max(1).values)
        assert torch.allclose(target.value.sum(1), torch.ones(4, dtype=torch.float64))
        assert not target.value.requires_grad
        assert not target.weigh_all


def test_self_adaptive_looks_at_the_attacked_output_where_there_is_no_other():
    adv = outputs(2)
    target = self_adaptive(None, adv, Y, make_context(4), momentum=0.0, start=0)
    assert torch.allclose(target.value, adv.logits.softmax(1))


def test_targets_belong_to_the_example_not_to_the_place_in_the_batch():
    first, state = outputs(3), {}
    self_adaptive(first, first, Y, make_context(4, state=state), momentum=0.5, start=0)
    order = torch.tensor([2, 0])
    again = Output(first.logits[order])
    context = make_context(4, state=state, index=order)
    target = self_adaptive(again, again, Y[order], context, momentum=1.0, start=0)
    assert torch.allclose(target.value, (0.5 * LABELS + 0.5 * first.logits.softmax(1))[order])


def test_weights_of_self_adaptive_training_are_on_the_fit_alone():
    """sum of w CE(z(x), t) / sum of w + mean of KL."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, x_adv = torch.rand(2, 4, 5, dtype=torch.float64)
    parts = Parts(attack=lambda *_: x_adv, targets=partial(self_adaptive, momentum=0.5, start=0))
    loss, _ = trades(model, x, Y, make_context(4, Linf(0.1), parts), weight=6.0)
    z, z_adv = model(x), model(x_adv)
    t = (0.5 * LABELS + 0.5 * z.softmax(1)).detach()
    w = t.max(1).values
    assert not torch.allclose(w, w.mean())
    each = -(t * z.log_softmax(1)).sum(1)
    assert loss.item() == pytest.approx(((w * each).sum() / w.sum() + 6 * divergence(z, z_adv).mean()).item())


def test_self_adaptive_without_movement_is_trades(toy_recipe, toy_data):
    toy_recipe |= {"objective": {"name": "trades"}}
    plain = train(toy_recipe, make_plain_model(), toy_data)
    kept = train(
        toy_recipe, make_plain_model(), toy_data, targets={"name": "self-adaptive", "momentum": 1.0, "start": 0}
    )
    moved = train(
        toy_recipe, make_plain_model(), toy_data, targets={"name": "self-adaptive", "momentum": 0.5, "start": 0}
    )
    assert same_weights(plain, kept, 1e-5)
    assert not same_weights(plain, moved, 1e-3)


# -- Adaptive targets of fast adversarial training --


def test_adaptive_targets_by_hand():
    state: dict[str, torch.Tensor] = {}
    moving = LABELS
    for epoch, adv in ((3, outputs(1)), (4, outputs(2)), (5, outputs(3))):
        context = make_context(4, epoch=epoch, state=state)
        target = adaptive(None, adv, Y, context, rho=0.8, beta=0.25, reweight=True, start=4)
        if epoch < 4:
            assert target.value is Y
            assert target.weight is None
            continue
        s = adv.logits.softmax(1).detach()
        moving = 0.8 * moving + 0.2 * s
        assert torch.allclose(target.value, 0.25 * LABELS + 0.75 * moving)
        assert torch.allclose(target.weight, s[torch.arange(4), Y])
        assert not target.value.requires_grad
        assert not target.weight.requires_grad


def test_full_memory_keeps_the_labels():
    state: dict[str, torch.Tensor] = {}
    for epoch in range(3):
        context = make_context(4, epoch=epoch, state=state)
        target = adaptive(None, outputs(epoch), Y, context, rho=1.0, beta=0.25, start=0)
        assert torch.allclose(target.value, LABELS)


def test_beta_zero_is_the_moving_target_alone():
    adv = outputs(1)
    target = adaptive(None, adv, Y, make_context(4), rho=0.0, beta=0.0, start=0)
    assert torch.allclose(target.value, adv.logits.softmax(1))


@pytest.mark.parametrize("change", [{}, {"augment": {"crop": 1, "flip": True}}])
def test_adaptive_with_the_labels_is_atta_bit_for_bit(toy_recipe, make_toy_model, toy_data, change):
    toy_recipe |= {"attack": {"name": "atta"}, "evaluate": {"attack_steps": 2, "select": "clean"}, **change}
    plain = train(toy_recipe, make_toy_model(), toy_data)
    options = {"name": "adaptive", "start": 0, "beta": 1.0}
    labels = train(toy_recipe, make_toy_model(), toy_data, targets=options)
    assert same_weights(plain, labels)
    assert [row["train_loss"] for row in plain.history] == [row["train_loss"] for row in labels.history]
    learned = train(toy_recipe, make_toy_model(), toy_data, targets={**options, "beta": 0.1})
    weighted = train(toy_recipe, make_toy_model(), toy_data, targets={**options, "reweight": True})
    late = train(toy_recipe, make_toy_model(), toy_data, targets={"name": "adaptive", "beta": 0.1, "start": 4})
    assert not same_weights(plain, learned)
    assert not same_weights(plain, weighted)
    assert same_weights(plain, late)


def test_weights_are_normalised():
    """The loss does not change with the scale of the weights, and equal ones are none."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3).double(), torch.rand(4, 5, dtype=torch.float64)
    w = torch.tensor([0.1, 0.7, 0.3, 0.0], dtype=torch.float64)

    def loss(weight):
        return standard(model, x, Y, make_context(4, parts=Parts(targets=lambda *_: Target(Y, weight, True))))[0].item()

    each = cross_entropy(model(x), Y, reduction="none").detach()
    assert loss(w) == pytest.approx(float((w * each).sum() / w.sum()))
    assert loss(100 * w) == pytest.approx(loss(w))
    assert loss(torch.full_like(w, 0.2)) == pytest.approx(loss(None))
    assert loss(torch.zeros_like(w)) == 0.0


# -- Geometry-aware weights --


def test_geometry_by_hand():
    kappa = torch.tensor([0.0, 0.5, 1.0, 0.2], dtype=torch.float64)
    context = make_context(4, epoch=3, notes={"kappa": kappa})
    target = geometry(None, outputs(0), Y, context, shift=-1.0, start=3)
    assert target.value is Y
    expected = [(1 + math.tanh(v)) / 2 for v in (4, -1, -6, 2)]
    assert target.weight.tolist() == pytest.approx(expected, rel=1e-9)
    early = geometry(None, outputs(0), Y, make_context(4, epoch=2, notes={"kappa": kappa}), start=3)
    assert early.weight is None


def test_geometry_weighs_by_the_attack_of_the_same_step():
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.rand(4, 5)
    context = make_context(4, Linf(0.3), Parts(attack=partial(pgd, steps=4), targets=partial(geometry, start=0)))
    loss, metrics = at(model, x, Y, context)
    kappa = context.notes["kappa"]
    assert len(set(kappa.tolist())) > 1
    assert float(metrics["kappa"]) == pytest.approx(kappa.mean().item())
    x_adv = pgd(model, x, Y, lambda z, y: cross_entropy(z, y, reduction="none"), make_context(4, Linf(0.3)), steps=4)
    w = (1 + torch.tanh(-1 + 5 * (1 - 2 * kappa))) / 2
    each = cross_entropy(model(x_adv), Y, reduction="none")
    assert loss.item() == pytest.approx(((w * each).sum() / w.sum()).item(), rel=1e-5)


# -- One look for each step --


def test_targets_are_looked_up_once_for_each_step_also_at_moved_weights(toy_recipe, make_toy_model, toy_data, tmp_path):
    """Four epochs move each target four times; a second look in the ascent of the weights would make it eight."""
    recipe = {
        **toy_recipe,
        "validation": 0,
        "targets": {"name": "adaptive", "start": 0, "rho": 0.5, "beta": 0.5},
        "perturb_weights": {"name": "awp", "delta": 0.01},
        "optimizer": {"lr": 1e-12, "momentum": 0.0},  # the output then hardly changes
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 2))
    train(recipe, model, toy_data, out=tmp_path / "run", threat="linf:0")
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)["objective"]
    with torch.no_grad():
        s = model(toy_data.train.x).softmax(1)
    labels = one_hot(toy_data.train.y, 2).float()
    assert torch.allclose(state["target"], 0.5**4 * labels + (1 - 0.5**4) * s, atol=1e-5)
    assert state["loss_count"].tolist() == [4.0] * 70


def test_losses_of_the_examples_are_totalled(toy_data, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 2))
    recipe = {
        "epochs": 3,
        "batch_size": 16,
        "validation": 0,
        "objective": {"name": "standard"},
        "optimizer": {"lr": 1e-12, "momentum": 0.0},
    }
    train(recipe, model, toy_data, out=tmp_path / "run")
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)["objective"]
    with torch.no_grad():
        each = cross_entropy(model(toy_data.train.x), toy_data.train.y, reduction="none")
    assert torch.allclose(state["loss_sum"], 3 * each, atol=1e-4)
