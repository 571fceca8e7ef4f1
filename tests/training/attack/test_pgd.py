"""Projected gradient ascent: steps and step sizes."""

import pytest
import torch

from attack_tasks import EPS, linear, with_margin
from contexts import make_context
from holdfast import Linf
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
