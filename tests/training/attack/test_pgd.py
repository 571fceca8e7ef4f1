"""Projected gradient ascent: steps and step sizes."""

import pytest
import torch
from torch import nn

from attack_tasks import EPS, linear, with_margin
from contexts import make_context
from holdfast import L2, InputError, Linf
from holdfast.training.attack.fgsm import fgsm, fgsm_rs
from holdfast.training.attack.pgd import pgd
from holdfast.training.step import fit


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


@pytest.mark.parametrize(("eps", "taken"), [(0.4, 50), (0.2, 30), (0.0, 10)])
def test_steps_follow_the_budget(eps, taken):
    """budget / 0.01 + 10 steps, of Liu et al., 2020."""
    x, y = with_margin(0.9)
    seen = []
    model = nn.Sequential(linear())
    model.register_forward_hook(lambda *_: seen.append(1))
    pgd(model, x, y, fit, make_context(x, Linf(eps)), steps=10, step_size=0.01, per_budget=True)
    passes = len(seen)
    seen.clear()
    pgd(model, x, y, fit, make_context(x, Linf(eps)), steps=taken, step_size=0.01)
    assert passes == len(seen)
    assert passes in (taken, taken + 1)


def test_steps_that_follow_the_budget_need_a_size():
    x, y = with_margin(0.9)
    with pytest.raises(InputError, match=r"attack\.step_size"):
        pgd(linear(), x, y, fit, make_context(x, Linf(0.1)), per_budget=True)


@pytest.mark.parametrize("attack", [pgd, fgsm, fgsm_rs])
def test_an_attack_in_bfloat16_finds_nearly_the_same_points(attack):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 3)).eval()
    x, y = torch.rand(6, 3, 8, 8), torch.arange(6) % 3
    full, half = (attack(model, x, y, fit, make_context(x, L2(0.5)), precision=p) for p in ("full", "bfloat16"))
    assert half.dtype == torch.float32
    assert bool(L2(0.5).contains(half, x).all())
    assert not torch.equal(full, half)
    assert torch.allclose(full, half, atol=0.02)
    assert all(p.requires_grad for p in model.parameters())
