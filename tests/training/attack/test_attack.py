"""The attacks that training may use: closed forms on a linear model, and what they keep from epoch to epoch."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import pad

from contexts import make_context
from holdfast import L1, L2, Box, Linf
from holdfast.random import Noise
from holdfast.registry import get, methods
from holdfast.training.attack.atas import atas
from holdfast.training.attack.atta import atta
from holdfast.training.attack.fgsm import fgsm, fgsm_rs, n_fgsm
from holdfast.training.attack.iat import iat
from holdfast.training.attack.pgd import pgd
from holdfast.training.augment import draw_transform
from holdfast.training.step import fit

W = torch.tensor([2.0, -1.0, 0.5])
EPS = 0.1
NORMS = {"linf": Linf(EPS), "l2": L2(EPS), "l1": L1(EPS), "box": Box(torch.tensor([0.1, 0.05, 0.2]))}
ATTACKS = [method.name for method in methods("train") if method.part == "attack"]
CLAIMS = [(name, norm) for name in ATTACKS for norm in get("train", name).threats]


def linear():
    """Margin of class 1 over class 0: W.x."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.stack([torch.zeros(3), W]))
    return model


def with_margin(*margins):
    """Inputs of class 1 with these values of W.x, far from the ends of the valid range."""
    m = torch.tensor(margins)
    return 0.5 + (m - 0.5 * W.sum())[:, None] / W.square().sum() * W, torch.ones(len(m), dtype=torch.int64)


def images(count=6):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.rand(count, 2, 5, 4), torch.arange(count) % 3


def run(name, model, x, y, context, **options):
    return get("train", name).function(model, x, y, fit, context, **options)


# -- All of them --


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


@pytest.mark.parametrize("name", ATTACKS)
def test_without_a_budget_nothing_moves(name):
    x, y = torch.rand(4, 3), torch.arange(4) % 2
    for epoch in (0, 9):
        assert torch.equal(run(name, linear(), x, y, make_context(x, Linf(0.0), epoch=epoch)), x)


@pytest.mark.parametrize("name", ATTACKS)
def test_batch_norm_is_touched_in_train_mode_alone(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    x, y = torch.rand(8, 3), torch.arange(8) % 2
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run(name, model, x, y, make_context(x, Linf(EPS), epoch=9))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    run(name, model, x, y, make_context(x, Linf(EPS), epoch=9), mode="train")
    assert model[1].num_batches_tracked > before["1.num_batches_tracked"]
    assert model.training
    assert model[1].training


@pytest.mark.parametrize("name", ATTACKS)
def test_an_example_gets_the_same_point_in_any_batch(name):
    x, y = torch.rand(6, 3), torch.arange(6) % 2
    whole = run(name, linear(), x, y, make_context(x, Linf(EPS)), **({"c": 1e6} if name == "atas" else {}))
    part = torch.tensor([4, 1])
    context = make_context(x[part], Linf(EPS), index=part, noise=Noise(0, part), count=6)
    again = run(name, linear(), x[part], y[part], context, **({"c": 1e6} if name == "atas" else {}))
    assert torch.allclose(again, whole[part], atol=1e-7)


# -- One step --


@pytest.mark.parametrize("norm", ["linf", "l2", "l1", "box"])
def test_fgsm_is_the_exact_worst_case_of_a_linear_model(norm):
    threat = NORMS[norm]
    x, y = with_margin(0.5, 0.9, 1.2)
    x_adv = fgsm(linear(), x, y, fit, make_context(x, threat))
    fall = threat.budget * threat.dual_norm(W[None])
    assert torch.allclose(x_adv @ W, x @ W - fall, atol=1e-6)


def test_fgsm_rs_by_hand():
    x, y = torch.rand(6, 3), torch.arange(6) % 2
    context = make_context(x, Linf(EPS))
    start = Linf(EPS).random_start(x, context.noise)
    assert not torch.equal(start, x)
    up = torch.where(y[:, None] == 1, -W.sign(), W.sign())
    expected = torch.clamp(start + 1.25 * EPS * up, x - EPS, x + EPS).clamp(0, 1)
    assert torch.allclose(fgsm_rs(linear(), x, y, fit, context), expected, atol=1e-7)
    small = torch.clamp(start + 0.1 * EPS * up, x - EPS, x + EPS).clamp(0, 1)
    assert torch.allclose(fgsm_rs(linear(), x, y, fit, context, step=0.1), small, atol=1e-7)


def test_n_fgsm_by_hand_and_not_projected():
    x, y = torch.rand(20, 3), torch.arange(20) % 2
    context = make_context(x, Linf(EPS))
    u = (2 * context.noise.uniform((3,)) - 1) * 2 * EPS
    up = torch.where(y[:, None] == 1, -W.sign(), W.sign())
    expected = ((x + u).clamp(0, 1) + EPS * up).clamp(0, 1)
    x_adv = n_fgsm(linear(), x, y, fit, context)
    assert torch.allclose(x_adv, expected, atol=1e-7)
    distance = Linf(EPS).distance(x_adv, x)
    assert distance.max() > 2 * EPS
    assert distance.max() <= 3 * EPS + 1e-6
    without = n_fgsm(linear(), x, y, fit, context, noise=0.0)
    assert torch.allclose(without, fgsm(linear(), x, y, fit, context), atol=1e-7)


# -- Projected gradient ascent --


def test_pgd_counts_the_steps_until_an_example_breaks():
    """A step of 0.02 takes 0.07 off the margin: 0.1 breaks after two steps, a wrong input after none, 1 never."""
    x, y = with_margin(0.1, -0.1, 1.0)
    context = make_context(x, Linf(EPS))
    pgd(linear(), x, y, fit, context, steps=5, step_size=0.02, random_start=False)
    assert context.notes["kappa"].tolist() == pytest.approx([2 / 5, 0.0, 1.0])


def test_pgd_step_follows_the_scheduled_budget():
    x, y = with_margin(0.9)
    moved = {}
    for eps in (0.1, 0.01):
        context = make_context(x, Linf(eps))
        start = Linf(eps).random_start(x, context.noise)
        x_adv = pgd(linear(), x, y, fit, context, steps=10)
        assert torch.allclose((x_adv - x).abs(), torch.full((1, 3), eps), atol=1e-6)  # 10 steps of eps / 4 reach it
        once = pgd(linear(), x, y, fit, context, steps=1, step_size=eps / 4)
        moved[eps] = (once - start).abs().max().item()
    assert moved[0.1] == pytest.approx(10 * moved[0.01], rel=1e-3)


# -- A budget for each example --

# A linear model holds at radius r if its margin is above 3.5 r: 0.525 at 0.15, 0.35 at 0.1.
MARGINS = (0.6, 0.45, 0.2, -0.1)


def test_iat_grows_stays_shrinks_and_leaves_wrong_inputs_alone():
    x, y = with_margin(*MARGINS)
    context = make_context(x, Linf(EPS), epoch=5)
    x_adv = iat(linear(), x, y, fit, context, gamma=0.5, beta=0.25)
    assert Linf(EPS).distance(x_adv, x).tolist() == pytest.approx([0.15, 0.1, 0.05, 0.0], abs=1e-6)
    assert torch.equal(x_adv[3], x[3])
    reached = torch.tensor([1.5, 1.0, 0.5, 0.5])
    assert torch.allclose(context.state["eps"], 0.75 + 0.25 * reached)
    assert torch.allclose(context.notes["eps"], EPS * reached)


def test_iat_goes_on_from_what_it_kept_and_never_below_zero():
    x, y = with_margin(0.6, 0.3, 0.2, -0.1)
    state = {"eps": torch.tensor([0.2, 0.2, 1.0, 0.3])}
    context = make_context(x, Linf(EPS), epoch=5, state=state)
    x_adv = iat(linear(), x, y, fit, context, gamma=0.5, beta=1.0)
    assert state["eps"].tolist() == pytest.approx([0.7, 0.7, 0.5, 0.0])
    assert Linf(EPS).distance(x_adv, x).tolist() == pytest.approx([0.07, 0.07, 0.05, 0.0], abs=1e-6)
    assert torch.allclose(x_adv[:3] @ W, x[:3] @ W - 3.5 * EPS * state["eps"][:3], atol=1e-5)


@pytest.mark.parametrize(("epoch", "options"), [(4, {"gamma": 0.5, "warmup": 5}), (9, {"gamma": 0.0})])
def test_iat_is_plain_adversarial_training(epoch, options):
    model, x, y = images()
    context = make_context(x, Linf(EPS), epoch=epoch)
    x_adv = iat(model, x, y, fit, context, steps=3, **options)
    assert torch.equal(x_adv, pgd(model, x, y, fit, make_context(x, Linf(EPS)), steps=3))
    assert context.state["eps"].tolist() == [1.0] * 6


# -- Caches --

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


# -- A step for each example --


def one_step(x, y, state=None, *, epoch=1, threat=None, model=None, **options):
    """One step of atas from x itself, not a fresh start; the context, x', and the gradient of each example's loss."""
    model = model or linear()
    state = {"delta": torch.zeros_like(x)} if state is None else state
    if "delta" in state and "drawn" not in state:
        state["drawn"] = torch.ones(len(x), dtype=torch.int64)
    context = make_context(x, threat or Linf(EPS), epoch=epoch, state=state)
    x_adv = atas(model, x, y, fit, context, **options)
    point = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(fit(model(point), y).sum(), point)
    return context, x_adv, gradient


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("c+sqrt(v)", lambda g, c: 0.5 * c / (c + g)),
        ("sqrt(v+c)", lambda g, c: 0.5 * c / (g**2 + c) ** 0.5),
    ],
)
def test_atas_step_of_one_example_without_memory(form, expected):
    x, y = with_margin(0.7)
    context, x_adv, gradient = one_step(x, y, step=0.5, c=0.3, beta=0.0, form=form)
    size = expected(gradient.norm().item(), 0.3)
    assert context.notes["step"].item() == pytest.approx(size, rel=1e-5)
    assert torch.allclose(x_adv, x + size * EPS * gradient.sign(), atol=1e-7)


def test_atas_remembers_the_squared_gradient_of_the_mean_loss():
    x, y = with_margin(0.7, 0.2)
    state = {"delta": torch.zeros_like(x)}
    _, _, gradient = one_step(x, y, state, beta=0.75, c=0.1)
    first = 0.25 * (gradient / 2).square().sum(1)  # the mean of two examples has half of each gradient
    assert torch.allclose(state["squared gradient"], first)
    state["delta"].zero_()
    context, _, _ = one_step(x, y, state, beta=0.75, c=0.1, epoch=2)
    v = 0.75 * first + 0.25 * (gradient / 2).square().sum(1)
    assert torch.allclose(state["squared gradient"], v)
    assert torch.allclose(context.notes["step"], 2 * 0.1 / (0.1 + v.sqrt()))


@pytest.mark.parametrize("form", ["c+sqrt(v)", "sqrt(v+c)"])
def test_atas_takes_smaller_steps_where_the_gradient_is_larger(form):
    x, y = with_margin(0.9, 0.6, 0.3, 0.0)
    context, _, gradient = one_step(x, y, form=form)
    assert gradient.norm(dim=1).diff().gt(0).all()
    assert context.notes["step"].diff().lt(0).all()


def test_atas_limits_and_warm_up():
    x, y = with_margin(0.9, 0.1)
    free = one_step(x, y, c=1.0)[0].notes["step"].tolist()
    assert 1.9 > free[0] > free[1]
    assert one_step(x, y, c=1.0, smallest=1.9)[0].notes["step"].tolist() == pytest.approx([1.9, 1.9])
    assert one_step(x, y, c=1.0, largest=free[1])[0].notes["step"].tolist() == pytest.approx([free[1], free[1]])
    assert one_step(x, y, c=1.0, warmup=2)[0].notes["step"].tolist() == [1.0, 1.0]
    assert one_step(x, y, c=1.0, warmup=2, epoch=2)[0].notes["step"].tolist() == free


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_atas_with_a_large_c_is_atta(norm):
    model, x, y = images()
    kept: dict[str, dict[str, torch.Tensor]] = {"atta": {}, "atas": {}}
    for epoch in range(3):
        contexts = {name: make_context(x, NORMS[norm], epoch=epoch, state=state) for name, state in kept.items()}
        expected = atta(model, x, y, fit, contexts["atta"], step=0.5)
        assert torch.equal(atas(model, x, y, fit, contexts["atas"], step=0.5, c=2.0**60), expected)


def test_defaults_are_the_published_settings():
    def default(function, option):
        return inspect.signature(function).parameters[option].default

    assert default(fgsm_rs, "step") == 1.25
    assert default(atta, "step") * 8 == 4
    assert (default(atas, "step") * 8, default(atas, "c"), default(atas, "beta")) == (16, 0.01, 0.5)
    assert (default(iat, "gamma") * 8, default(iat, "beta")) == (1.9, 0.1)
