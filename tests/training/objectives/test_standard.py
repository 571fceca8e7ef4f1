"""Training without an adversary."""

import pytest
import torch
from torch import nn

from contexts import make_context
from holdfast.training.objectives.standard import standard


@pytest.fixture
def linear():
    """Margin of class 1 over class 0: w.x with w = (2, -1, 0.5)."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 0.0, 0.0], [2.0, -1.0, 0.5]]))
    return model


def test_standard_is_the_cross_entropy(linear):
    x, y = torch.rand(5, 3), torch.tensor([0, 1, 1, 0, 1])
    loss, metrics = standard(linear, x, y, make_context(5))
    margin = (x @ torch.tensor([2.0, -1.0, 0.5])) * (2 * y - 1)
    assert loss.item() == pytest.approx(torch.log1p(torch.exp(-margin)).mean().item(), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx((margin > 0).float().mean().item())
