"""A budget for each example."""

import pytest
import torch

from attack_tasks import EPS, W, images, linear, with_margin
from contexts import make_context
from holdfast import Linf
from holdfast.training.attack.iat import iat
from holdfast.training.attack.pgd import pgd
from holdfast.training.step import fit

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
