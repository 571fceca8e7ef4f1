"""Sample-wise pyramid adversarial training."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast.training.objectives.pat import pat

SMALL = {"levels": (2, 1), "multipliers": (5.0, 1.0), "radius": 0.02}


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.rand(6, 1, 4, 6, dtype=torch.float64), torch.arange(6) % 3


def seen_by(model, x, y, **options):
    """The inputs of the last pass, and the loss."""
    seen = []
    handle = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    loss, _ = pat(model, x, y, make_context(x), **options)
    handle.remove()
    return seen[-1], loss


def slow_pat(model, x, y, steps, radius):
    """One image after another, through the definition."""
    found = []
    for image, label in zip(x, y, strict=True):
        coarse, fine = torch.zeros(1, 2, 3, dtype=x.dtype), torch.zeros(1, 4, 6, dtype=x.dtype)
        for _ in range(steps):
            coarse, fine = coarse.requires_grad_(True), fine.requires_grad_(True)
            delta = 5 * coarse.repeat_interleave(2, 1).repeat_interleave(2, 2) + fine
            gradients = torch.autograd.grad(cross_entropy(model((image + delta)[None]), label[None]), (coarse, fine))
            coarse, fine = (
                (v + radius / steps * g.sign()).clamp(-radius, radius).detach()
                for v, g in zip((coarse, fine), gradients, strict=True)
            )
        found.append(image + 5 * coarse.repeat_interleave(2, 1).repeat_interleave(2, 2) + fine)
    return torch.stack(found)


@pytest.mark.parametrize("steps", [1, 3])
def test_it_is_the_slow_reference_and_raises_the_loss(problem, steps):
    model, x, y = problem
    x_adv, loss = seen_by(model, x, y, steps=steps, **SMALL)
    assert torch.allclose(x_adv, slow_pat(model, x, y, steps, 0.02))
    clean, adversarial = cross_entropy(model(x), y), cross_entropy(model(x_adv), y)
    assert loss.item() == pytest.approx((clean + adversarial).item())
    assert adversarial > clean
    assert (x_adv - x).abs().max() <= 6 * 0.02 + 1e-12


def test_a_random_start_is_inside_and_decided_by_the_seed(problem):
    model, x, y = problem
    first, second = (seen_by(model, x, y, steps=1, step=1e-9, start="random", **SMALL)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert 0.05 < (first - x).max() <= 0.12 + 1e-7
    assert -0.12 - 1e-7 <= (first - x).min() < -0.05
    assert len({round(float(v), 9) for v in (first - x).flatten()}) > 100


def test_a_random_target_lowers_the_loss_of_another_class(problem):
    model, x, y = problem
    x_adv, _ = seen_by(model, x, y, steps=3, target="random", **SMALL)
    others = torch.stack([cross_entropy(model(x_adv), (y + k) % 3, reduction="none") for k in (1, 2)])
    before = torch.stack([cross_entropy(model(x), (y + k) % 3, reduction="none") for k in (1, 2)])
    assert ((others < before).any(0)).all()


def test_clipping_keeps_the_pixel_range(problem):
    model, x, y = problem
    x_adv, _ = seen_by(model, x, y, steps=2, clip_input=True, **{**SMALL, "radius": 0.5})
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1
