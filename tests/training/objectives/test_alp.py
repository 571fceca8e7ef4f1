"""Adversarial logit pairing: its penalty is bounded."""

import pytest
import torch
from torch import nn

from contexts import make_context
from holdfast.training.objectives.alp import alp
from paired_tasks import given_points


@pytest.fixture
def problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.rand(10, 4, dtype=torch.float64), torch.arange(10) % 3


def test_the_pairing_of_outputs_is_at_most_two(problem):
    """Two distributions are never further apart than the square root of two."""
    model, x, y = problem
    with torch.no_grad():
        model[0].weight.mul_(50)
        model[2].weight.mul_(50)
    x_adv = torch.rand_like(x)
    pairing = (model(x).softmax(1) - model(x_adv).softmax(1)).square().sum(1)
    assert pairing.max() > 1.5  # the bound is nearly met
    without, with_pair = (
        alp(model, x, y, make_context(x, None, given_points(x_adv)), weight=weight)[0].item() for weight in (0.0, 1.0)
    )
    assert with_pair - without == pytest.approx(pairing.mean().item())
    assert 0 < with_pair - without <= 2
