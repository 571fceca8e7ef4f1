"""RSE: cross-entropy under the noise of the network itself."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast.attacks.core.chance import seeded
from holdfast.models import rse as make_random
from holdfast.training.objectives.rse import rse


def test_the_loss_is_the_cross_entropy_of_one_draw():
    torch.manual_seed(0)
    model = make_random(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    x, y = torch.rand(8, 4), torch.arange(8) % 3
    with seeded(5, x.device):
        loss, metrics = rse(model, x, y, make_context(x))
    with seeded(5, x.device):
        logits = model(x)
    assert loss.item() == pytest.approx(cross_entropy(logits, y).item())
    assert metrics["accuracy"].item() == pytest.approx((logits.argmax(1) == y).float().mean().item())
    assert loss.item() != pytest.approx(cross_entropy(model.sample(0)(x), y).item())
