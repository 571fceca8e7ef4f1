"""SmoothAdv: what it attacks, and where."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.random import Noise
from holdfast.training import load_recipe
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Parts
from holdfast.training.objectives.core.noisy_copies import draw
from holdfast.training.objectives.gaussian import gaussian
from holdfast.training.objectives.smoothadv import SoftVote, smoothadv
from noisy_tasks import RECIPE, net, noisy_logits, task


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


def test_smoothadv_needs_an_l2_ball():
    with pytest.raises(hf.UnsupportedError, match="'smoothadv' does not handle the threat 'linf"):
        load_recipe({**RECIPE, "threat": "linf:0.1", "objective": {"name": "smoothadv"}})
