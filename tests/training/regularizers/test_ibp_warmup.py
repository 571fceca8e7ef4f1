"""The warm-up regulariser by hand."""

import pytest
import torch
from torch import nn

import holdfast as hf
from certified_tasks import batch, net
from contexts import make_context
from holdfast.training.objectives.core.certified import certified_loss
from holdfast.training.regularizers.ibp_warmup import ibp_warmup
from holdfast.training.step import Taken


def test_the_warm_up_regularizer_by_hand() -> None:
    """Bounds before four ReLUs, each 0.4 wide, around 2 and 4 (active), -1 (dead) and 0 (neither)."""
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[0].bias.copy_(torch.tensor([1.0, 3.0, -2.0, -1.0]))
    x = torch.full((3, 1), 0.5, dtype=torch.float64)
    context = make_context(5, hf.Linf(0.1), ramp=0.25)
    taken = Taken(model, None, x, x, None, None, None, context, None)  # type: ignore[arg-type]
    penalty, figures = ibp_warmup(taken, weight=2.0, tolerance=0.8)
    tightness = (0.8 - 0.2 / 0.4) / 0.8
    means = 1 / (2 + 4)
    variances = (-1 - 1.25) ** 2 / ((2 - 1.25) ** 2 + (4 - 1.25) ** 2)
    balance = ((0.8 - means) + (0.8 - variances)) / 0.8
    assert figures["tightness"].item() == pytest.approx(tightness)
    assert figures["balance"].item() == pytest.approx(balance)
    assert penalty.item() == pytest.approx(2.0 * 0.75 * (tightness + balance))


def test_the_warm_up_regularizer_prefers_narrow_and_balanced_bounds() -> None:
    def value(scale: float) -> float:
        model, (x, y) = net(), batch()
        with torch.no_grad():
            model[0].weight.mul_(scale)
        context = make_context(5, hf.Linf(0.05), ramp=0.5)
        relaxed = certified_loss(model, x, y, hf.Linf(0.05))[3]
        taken = Taken(model, None, x, x, None, None, None, context, relaxed)  # type: ignore[arg-type]
        penalty, figures = ibp_warmup(taken, weight=2.0)
        assert penalty.item() == pytest.approx((figures["tightness"] + figures["balance"]).item())
        return float(figures["tightness"].detach())

    assert value(10.0) > value(1.0) >= value(0.01) == 0.0
