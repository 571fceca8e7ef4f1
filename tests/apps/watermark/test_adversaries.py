"""Removal attacks: none touches the owner's model, each does what it says, none beats the certificate in its ball."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from holdfast.apps.watermark import (
    TOOLBOX,
    AttackLog,
    Criterion,
    Snapshot,
    certify_watermark,
    drift,
    epochs_to_leave,
    fine_tune,
    noisy_accuracies,
    parameter_pgd,
    removal,
    removal_time,
    trigger_accuracy,
)
from holdfast.apps.watermark.anatomy import last_layer
from holdfast.apps.watermark.attacks_toolbox import prune, quantise, shift, shuffle_features
from holdfast.apps.watermark.backdoors import reconstruct
from holdfast.errors import InputError, UnsupportedError
from watermark_task import make_marked, make_task

QUIET = {"epochs": 0, "lr": 1e-3, "seed": 0, "watch": lambda model: None}


@pytest.fixture(scope="module")
def task():
    return make_task()


@pytest.fixture(scope="module")
def marked():
    return make_marked()


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", TOOLBOX)
def test_attacks_leave_the_owners_model_alone(name, marked):
    task, net, _ = marked
    before, seen = state(net), []
    how = {"epochs": 1, "lr": 1e-3, "seed": 0, "watch": seen.append} | ({"steps": 5} if "neural" in name else {})
    attacked = TOOLBOX[name](net, task.x[:64], task.y[:64], **how)
    assert same(state(net), before)
    assert not net.training
    assert all(p.grad is None for p in net.parameters())
    assert attacked is not net
    assert not attacked.training
    assert not same(state(attacked), before)
    assert len(seen) == (2 if name == "quantisation" else 1)
    again = TOOLBOX[name](net, task.x[:64], task.y[:64], **how)
    assert same(state(attacked), state(again))


@pytest.mark.parametrize("targets", ["true", "hard", "soft"])
def test_fine_tuning_by_hand(targets, marked):
    task, net, _ = marked
    x, y = task.x[:40], (task.y[:40] + 1) % 3  # wrong labels, so that the three kinds differ
    got = fine_tune(net, x, y, targets=targets, lr=1e-2, epochs=2, batch_size=40, weight_decay=0.1, decay_epochs=1)
    want = copy.deepcopy(net).train()
    with torch.no_grad():
        answers = net(x)
    goal = {"true": y, "hard": answers.argmax(1), "soft": answers.softmax(1)}[targets]
    adam = torch.optim.Adam(want.parameters(), 1e-2, weight_decay=0.1)
    for _ in range(2):
        adam.zero_grad()
        cross_entropy(want(x), goal).backward()
        adam.step()
        adam.param_groups[0]["weight_decay"] = 0.0
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_without_a_learning_rate_nothing_changes(marked):
    task, net, _ = marked
    assert same(state(fine_tune(net, task.x, task.y, lr=0.0, epochs=2)), state(net))


def test_last_layer_attacks_change_the_last_layer_alone(task):
    net = task.net(norm=True).eval()
    last = f"{len(net) - 1}."
    for name in ("ftll", "rtll"):
        attacked = TOOLBOX[name](net, task.x, task.y, epochs=1, lr=1e-2, seed=0, watch=lambda m: None)
        changed = {k for k, v in attacked.state_dict().items() if not torch.equal(v, net.state_dict()[k])}
        assert changed == {f"{last}weight", f"{last}bias"}
    assert last_layer(net) is net[-1]
    for name in ("ftal", "rtal"):
        attacked = TOOLBOX[name](net, task.x, task.y, epochs=1, lr=1e-2, seed=0, watch=lambda m: None)
        assert not any(torch.equal(v, net.state_dict()[k]) for k, v in attacked.named_parameters())
    assert drift(attacked, net).buffers > 0


def test_drift_is_the_norm_of_the_difference(task):
    a, b = task.net(norm=True), task.net(norm=True, seed=1)
    b[1].running_mean += 2.0
    flat = [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (a, b)]
    assert drift(a, b).parameters == pytest.approx(float((flat[0] - flat[1]).norm()), rel=1e-5)
    assert drift(a, b).buffers == pytest.approx(2 * math.sqrt(6))
    assert drift(a, a).parameters == drift(a, a).buffers == 0.0
    with pytest.raises(InputError, match="one architecture: '1"):
        drift(a, task.net())


def test_the_time_to_leave_a_radius_is_that_of_the_first_step_beyond(marked):
    task, net, _ = marked
    x, y, how = task.x[:64], task.y[:64], {"lr": 1e-3, "batch_size": 10, "seed": 2}  # 7 steps in an epoch
    far = []
    fine_tune(net, x, y, epochs=2, **how, watch_steps=lambda now: far.append(drift(now, net).parameters))
    assert len(far) == 14
    # The first step of Adam moves every weight with a gradient by lr.
    assert far[0] <= 1e-3 * math.sqrt(sum(p.numel() for p in net.parameters())) * (1 + 1e-6)
    radii = [0.0, far[0], (far[3] + far[4]) / 2, far[8], 10 * max(far)]
    first = [next((i for i, d in enumerate(far, 1) if d >= radius), None) for radius in radii]
    assert epochs_to_leave(net, x, y, radii, epochs=2, **how) == tuple(None if i is None else i / 7 for i in first)
    assert first[0] == first[1] == 1
    assert first[-1] is None
    assert epochs_to_leave(net, x, y, [1e-9], epochs=1, lr=0.0) == (None,)
    with pytest.raises(InputError, match="radii must be finite"):
        epochs_to_leave(net, x, y, [])


@pytest.mark.parametrize("radius", [0.0, 0.1, 1.0])
def test_parameter_pgd_stays_in_its_ball_and_raises_the_loss(radius, marked):
    task, net, _ = marked
    attacked = parameter_pgd(net, task.triggers.x, task.triggers.y, radius, steps=10)
    assert drift(attacked, net).parameters <= radius
    assert drift(attacked, net).buffers == 0
    with torch.no_grad():
        before, after = (float(cross_entropy(m(task.triggers.x), task.triggers.y)) for m in (net, attacked))
    assert after > before if radius else after == before
    if radius:
        assert drift(attacked, net).parameters > 0.5 * radius


def test_parameter_pgd_finds_the_optimum_of_a_linear_loss():
    # Logits (0, z), z = theta . x: the loss of class 0 grows fastest along x, so the best change is radius * x / |x|.
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.theta = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x):
            z = x @ self.theta
            return torch.stack([torch.zeros_like(z), z], 1)

    net, x = Line(), torch.tensor([[3.0, 4.0]])
    attacked = parameter_pgd(net, x, torch.tensor([0]), 0.5, steps=5)
    torch.testing.assert_close(attacked.theta.detach(), torch.tensor([1.3, 2.4]), atol=1e-4, rtol=0)


def test_no_attack_in_the_ball_beats_the_certificate(marked):
    task, net, _ = marked
    radii, sigma = (0.2, 0.5), 0.3
    certificate = certify_watermark(net, task.triggers, radii, sigma=sigma, n=500, confidence=0.999)
    for radius, proved in zip(radii, certificate.certified, strict=True):
        for noise, samples in ((0.0, 1), (sigma, 3)):
            attacked = parameter_pgd(
                net, task.triggers.x, task.triggers.y, radius, sigma=noise, samples=samples, steps=15
            )
            right = noisy_accuracies(attacked, task.triggers, sigma=sigma, n=150, seed=9)
            assert right.median() / 24 >= proved
    assert certificate.certified[0] > 1 / 3
    far = parameter_pgd(net, task.triggers.x, task.triggers.y, 5.0, sigma=sigma, samples=3, steps=15)
    after = noisy_accuracies(far, task.triggers, sigma=sigma, n=150, seed=9)
    assert after.median() / 24 < certificate.certified[0]  # the attack is no straw man


def test_shuffled_features_compute_the_same_with_other_weights(task):
    net = task.net(norm=True)
    net(task.x)  # statistics other than 0 and 1
    net.eval()
    shuffled = shuffle_features(net, task.x, task.y, **QUIET)
    torch.testing.assert_close(shuffled(task.x), net(task.x), rtol=1e-4, atol=1e-5)
    assert drift(shuffled, net).parameters > 1.0


def test_shuffling_leaves_the_white_box_accuracy(marked):
    task, net, _ = marked
    shuffled = shuffle_features(net, task.x, task.y, **QUIET)
    a, b = (noisy_accuracies(m, task.triggers, sigma=0.5, n=300, seed=s).double() for m, s in ((net, 0), (shuffled, 1)))
    assert float(a.std()) > 0.5
    assert abs(float(a.mean() - b.mean())) < 4 * float(a.std()) * math.sqrt(2 / 300)


def test_shuffling_refuses_what_it_has_no_rule_for():
    with pytest.raises(UnsupportedError, match="no rule for Softmax"):
        shuffle_features(nn.Sequential(nn.Linear(2, 3), nn.Softmax(1), nn.Linear(3, 2)), None, None, **QUIET)
    with pytest.raises(UnsupportedError, match="no hidden layer"):
        shuffle_features(nn.Sequential(nn.Linear(2, 3)), None, None, **QUIET)
    with pytest.raises(UnsupportedError, match="groups"):
        shuffle_features(nn.Sequential(nn.Conv2d(2, 4, 3, groups=2)), None, None, **QUIET)
    with pytest.raises(UnsupportedError, match="no dense layer"):
        last_layer(nn.Conv2d(1, 1, 1))


def test_pruning_zeroes_the_smallest_weights(marked):
    task, net, _ = marked
    assert same(state(prune(net, task.x, task.y, **QUIET, share=0.0)), state(net))
    pruned = prune(net, task.x, task.y, **QUIET, share=0.4)
    old = torch.cat([p.flatten() for p in net.parameters() if p.ndim > 1]).detach()
    new = torch.cat([p.flatten() for p in pruned.parameters() if p.ndim > 1]).detach()
    gone = new == 0
    assert int(gone.sum()) == round(0.4 * len(old))
    assert old[gone].abs().max() <= old[~gone].abs().min()
    assert torch.equal(new[~gone], old[~gone])
    with pytest.raises(InputError, match="share"):
        prune(net, task.x, task.y, **QUIET, share=1.1)


def test_quantisation_converges_to_the_identity(marked):
    task, net, _ = marked
    moved = [drift(quantise(net, task.x, task.y, **QUIET, bits=b), net).parameters for b in (1, 3, 6, 20)]
    assert moved[0] > moved[1] > moved[2] > moved[3]
    assert moved[3] < 1e-4
    coarse = quantise(net, task.x, task.y, **QUIET, bits=2)
    assert all(len(p.unique()) <= 4 for p in coarse.parameters() if p.ndim > 1)
    with pytest.raises(InputError, match="bits"):
        quantise(net, task.x, task.y, **QUIET, bits=0)


def test_shifting_moves_each_filter_by_one_number(marked):
    task, net, _ = marked
    shifted = shift(net, task.x, task.y, **QUIET)
    change = (shifted[0].weight - net[0].weight).detach().flatten(1)
    torch.testing.assert_close(change, change[:, :1].expand_as(change), rtol=1e-3, atol=1e-5)
    assert change[:, 0].std() > 0
    assert same(state(shift(net, task.x, task.y, **QUIET, scale=0.0)), state(net))


def test_the_patch_of_a_backdoor_is_the_smallest():
    # Class 2 is one bright pixel in the corner away, the others need half of the image.
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    with torch.no_grad():
        net[1].weight.zero_()
        net[1].weight[0, :8], net[1].weight[1, 8:] = 2.0, 2.0
        net[1].weight[2, 15], net[1].weight[2, 3] = 30.0, -5.0
        net[1].bias.copy_(torch.tensor([0.0, 0.0, -4.0]))
    x = 0.1 * torch.rand(12, 1, 4, 4)
    x[:6, :, :2] += 0.8
    x[6:, :, 2:] += 0.8
    x[:, :, 3, 3] = 0.0
    patches = reconstruct(net, x, steps=100, weight=0.05)
    assert patches.mask.shape == (3, 1, 4, 4)
    assert patches.suspects == [2]
    assert (net(patches.put(x, 2)).argmax(1) == 2).float().mean() > 0.9
    assert int(patches.mask[2].flatten().argmax()) == 15
    with pytest.raises(InputError, match="images of shape"):
        reconstruct(net, x.flatten(1))


def test_the_log_and_the_criterion(marked):
    task, net, _ = marked
    log = AttackLog(net, task.x, task.y, task.triggers, sigma=0.3, n=20)
    TOOLBOX["rtal"](net, task.x, task.y, epochs=2, lr=1e-2, seed=0, watch=log.watch)
    assert [row.epoch for row in log.rows] == [0, 1, 2]
    assert log.rows[0].distance == 0
    assert log.rows[0].black_box == trigger_accuracy(net, task.triggers)
    assert log.rows[1].distance > 0
    assert 0 == log.rows[0].seconds < log.rows[1].seconds < log.rows[2].seconds
    with pytest.raises(InputError, match="test inputs"):
        AttackLog(net, task.x[:0], task.y[:0], task.triggers, sigma=0.3)


def test_the_log_has_the_median_of_the_noisy_copies(marked, monkeypatch):
    task, net, _ = marked
    monkeypatch.setattr(removal, "noisy_accuracies", lambda *a, **k: torch.tensor([9, 2, 7, 4]))
    log = AttackLog(net, task.x, task.y, task.triggers, sigma=0.3, n=4)
    assert log.rows[0].white_box == 4 / len(task.triggers)


def test_removal_needs_both_conditions_in_time():
    rows = [
        Snapshot(i, float(i), test, black, white, 0.0, 0.0)
        for i, (test, black, white) in enumerate(
            [(0.9, 1.0, 1.0), (0.7, 0.1, 0.1), (0.85, 0.3, 1.0), (0.83, 0.29, 0.9), (0.82, 0.0, 0.0)]
        )
    ]
    assert removal_time(rows, Criterion(), white_box=False) == 3.0
    assert removal_time(rows, Criterion(), white_box=True) is None
    assert removal_time(rows, Criterion(seconds=2.0), white_box=False) is None
    assert removal_time(rows, Criterion(test_accuracy=0.6), white_box=True) == 1.0
    assert removal_time([], Criterion(), white_box=True) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n, x, y: fine_tune(n, x, targets="true"), "needs labels"),
        (lambda n, x, y: fine_tune(n, x, y, targets="none"), "'true', 'hard' or 'soft'"),
        (lambda n, x, y: fine_tune(n, x, y[:3]), "one target for each"),
        (lambda n, x, y: fine_tune(n, x[:0], y[:0]), "there must be inputs"),
        (lambda n, x, y: fine_tune(n, x, y, lr=-1.0), "lr"),
        (lambda n, x, y: parameter_pgd(n, x, y, -0.1), "radius"),
        (lambda n, x, y: parameter_pgd(n, x, y, math.inf), "radius"),
        (lambda n, x, y: parameter_pgd(n, x, y, 1.0, steps=0), "steps"),
        (lambda n, x, y: parameter_pgd(nn.Flatten(), x, y, 1.0), "no parameters"),
        (lambda n, x, y: prune(nn.Flatten(), x, y, **QUIET), "no dense layer"),
    ],
)
def test_bad_input_is_refused(call, message, marked):
    task, net, _ = marked
    with pytest.raises(InputError, match=message):
        call(net, task.x, task.y)
