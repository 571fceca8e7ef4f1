"""Cached perturbations, through crops and flips."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import pad

from attack_tasks import ATTACKS, EPS, NORMS, W, images, linear, run, with_margin
from contexts import make_context
from holdfast import L1, L2, Linf
from holdfast.random import Noise
from holdfast.registry import get
from holdfast.training.attack.atas import atas
from holdfast.training.attack.atta import atta, enlarge, shrink
from holdfast.training.augment import draw_transform
from holdfast.training.step import fit

CLAIMS = [(name, norm) for name in ATTACKS for norm in get("train", name).threats]


@pytest.mark.parametrize(("name", "norm"), CLAIMS)
def test_points_lie_in_the_set_in_every_norm_that_an_attack_claims(name, norm):
    x, y = torch.rand(8, 3), torch.arange(8) % 2
    threat, model = NORMS[norm], linear()
    state: dict[str, torch.Tensor] = {}
    for epoch in range(3):
        x_adv = run(name, model, x, y, make_context(x, threat, epoch=epoch, state=state))
        assert x_adv.shape == x.shape
        assert not x_adv.requires_grad
        if name != "n-fgsm":
            assert threat.contains(x_adv, x).all()
        assert not torch.equal(x_adv, x)
    assert fit(model(x_adv), y).mean() > fit(model(x), y).mean()
    assert model.weight.requires_grad
    assert model.weight.grad is None


frames = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.booleans())


@given(frames, st.integers(0, 10**6))
def test_what_a_batch_writes_into_the_frame_it_reads_back(shape, seed):
    channels, height, width, crop, flip = shape
    transform = draw_transform(Noise(seed, torch.arange(4)), crop=crop, flip=flip)
    frame = torch.rand(4, channels, height + 2 * crop, width + 2 * crop)
    values = torch.rand(4, channels, height, width) + 2
    kept = frame.clone()
    written = transform.write(values, frame)
    assert torch.equal(frame, kept)
    assert torch.equal(transform.read(written), values)
    assert torch.equal(transform.write(transform.read(frame), frame), frame)
    assert int((written != frame).sum()) == values.numel()  # and nothing else has changed


@given(frames, st.integers(0, 10**6))
def test_a_perturbation_stays_on_the_pixels_it_was_made_for(shape, seed):
    channels, height, width, crop, flip = shape
    transform = draw_transform(Noise(seed, torch.arange(4)), crop=crop, flip=flip)
    x, delta = torch.rand(2, 4, channels, height, width)
    assert torch.allclose(transform(x) + transform.read(pad(delta, [crop] * 4)), transform(x + delta))


class Watched(nn.Module):
    """Keeps the inputs that it is asked about."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        return self.model(x)


@pytest.mark.parametrize("name", ["atta", "atas"])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_cache_goes_through_crops_and_flips_and_stays_in_the_budget(name, norm):
    threat = {"linf": Linf(0.05), "l2": L2(0.2), "l1": L1(0.5)}[norm]
    model, images_, y = images()
    watched, state = Watched(model), {}
    frame = None
    for epoch in range(4):
        transform = draw_transform(Noise(epoch, torch.arange(6)), crop=2, flip=True)
        x = transform(images_)
        x_adv = run(name, watched, x, y, make_context(x, threat, epoch=epoch, state=state, transform=transform))
        assert threat.contains(x_adv, x).all()
        assert state["delta"].shape == (6, 2, 9, 8)
        assert torch.equal(transform.read(state["delta"]), x_adv - x)
        if frame is not None:
            assert torch.allclose(watched.seen[-1], threat.project(x + transform.read(frame), x))
            unseen = transform.write(torch.zeros_like(x), torch.ones_like(frame)) == 1
            assert torch.equal(state["delta"][unseen], frame[unseen])
        frame = state["delta"].clone()
    assert len(watched.seen) == 4


def test_atta_by_hand_over_two_epochs():
    x, y = with_margin(0.9, 1.2)
    up, state = -W.sign(), {}
    first = make_context(x, Linf(EPS), state=state)
    start = Linf(EPS).random_start(torch.full((2, 3), 0.5), first.noise) - 0.5
    one = (start + 0.25 * EPS * up).clamp(-EPS, EPS)
    assert torch.allclose(atta(linear(), x, y, fit, first, step=0.25) - x, one, atol=1e-6)
    two = (one + 0.25 * EPS * up).clamp(-EPS, EPS)
    x_adv = atta(linear(), x, y, fit, make_context(x, Linf(EPS), epoch=1, state=state), step=0.25)
    assert torch.allclose(x_adv - x, two, atol=1e-6)
    assert torch.equal(state["delta"], x_adv - x)


def test_perturbations_shrink_with_the_scheduled_budget():
    model, x, y = images()
    state: dict[str, torch.Tensor] = {}
    atta(model, x, y, fit, make_context(x, Linf(0.2), state=state))
    x_adv = atta(model, x, y, fit, make_context(x, Linf(0.01), epoch=1, state=state))
    assert Linf(0.01).contains(x_adv, x).all()


@pytest.mark.parametrize("attack", [atta, atas])
def test_caches_are_drawn_anew(attack):
    model, x, y = images()
    watched, state = Watched(model), {}
    fresh = []
    for epoch in range(5):
        noise = Noise(epoch, torch.arange(6))
        context = make_context(x, Linf(0.05), epoch=epoch, state=state, noise=noise)
        attack(watched, x, y, fit, context, reset_every=2)
        random = Linf(0.05).random_start(torch.full_like(x, 0.5), noise) - 0.5
        fresh.append(torch.equal(watched.seen[-1], Linf(0.05).project(x + random, x)))
    assert fresh == [True, False, True, False, True]


def test_examples_that_come_late_start_at_random_and_early_ones_do_not_start_again():
    """With additional data, an epoch may see an example twice, or not at all."""
    model, x, y = images()
    watched, state, met = Watched(model), {}, set()
    for epoch, part in ((0, [0, 1, 2]), (0, [2, 3, 4]), (1, [4, 5])):
        index = torch.tensor(part)
        known = state.get("delta", torch.zeros_like(x)).clone()
        context = make_context(
            x[index], Linf(0.05), epoch=epoch, index=index, noise=Noise(1, index), count=6, state=state
        )
        atta(watched, x[index], y[index], fit, context)
        random = Linf(0.05).random_start(torch.full_like(x[index], 0.5), context.noise) - 0.5
        late = torch.tensor([i not in met for i in part])
        delta = torch.where(late[:, None, None, None], random, known[index])
        assert torch.allclose(watched.seen[-1], Linf(0.05).project(x[index] + delta, x[index]))
        met.update(part)


@pytest.mark.parametrize("name", ["atta", "atas"])
@pytest.mark.parametrize("crop", [0, 2])
def test_perturbations_kept_at_low_resolution_stay_in_the_budget(name, crop):
    model, x, y = images()
    state: dict[str, torch.Tensor] = {}
    for epoch in range(3):
        transform = draw_transform(Noise(epoch, torch.arange(len(x))), crop=crop, flip=True)
        context = make_context(x, Linf(0.05), epoch=epoch, state=state, transform=transform)
        seen = transform(x)
        x_adv = run(name, model, seen, y, context, resolution=3)
        assert state["delta"].shape == (len(x), 2, 3, 3)
        assert state["delta"].abs().max() <= 0.05 + 1e-7
        assert state["delta"].abs().max() > 0
        assert Linf(0.05).contains(x_adv, seen).all()


def test_what_is_kept_are_means_over_cells_in_the_frame_without_crop_and_flip():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
    x, y = 0.3 + 0.4 * torch.rand(5, 1, 4, 6), torch.arange(5) % 3
    transform = draw_transform(Noise(1, torch.arange(5)), crop=0, flip=True)
    state: dict[str, torch.Tensor] = {}
    context = make_context(x, Linf(0.05), state=state, transform=transform)
    seen = transform(x)
    x_adv = atta(model, seen, y, fit, context, step=0.5, resolution=2)
    delta = torch.where(transform.flipped[:, None, None, None], (x_adv - seen).flip(-1), x_adv - seen)
    cells = delta.reshape(5, 1, 2, 2, 2, 3).mean((3, 5))
    assert torch.allclose(state["delta"], cells, atol=1e-7)
    assert torch.allclose(shrink(enlarge(cells, [1, 4, 6]), 2), cells, atol=1e-7)
    model_seen = Watched(model)
    atta(model_seen, x, y, fit, make_context(x, Linf(0.05), epoch=1, state=state), step=0.5, resolution=2)
    assert torch.allclose(model_seen.seen[0] - x, enlarge(cells, [1, 4, 6]), atol=1e-6)


def test_a_resolution_that_is_large_enough_changes_nothing():
    model, x, y = images()
    answers = []
    for options in ({}, {"resolution": 5}):
        state: dict[str, torch.Tensor] = {}
        for epoch in range(3):
            x_adv = atta(model, x, y, fit, make_context(x, Linf(0.05), epoch=epoch, state=state), **options)
        answers.append(x_adv)
    assert torch.equal(*answers)
