"""One gradient step against its formula."""

import pytest
import torch

from attack_tasks import EPS, NORMS, W, linear, with_margin
from contexts import make_context
from holdfast import Linf
from holdfast.training.attack.fgsm import fgsm, fgsm_rs, n_fgsm
from holdfast.training.step import fit


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
