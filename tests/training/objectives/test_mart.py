"""MART: its terms, and what it does where it is certain."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast.training.objectives.mart import margin_loss, mart
from paired_tasks import given_points, logits


@given(logits, logits, st.integers(0, 2))
def test_the_terms_of_mart_are_not_negative(z, z_adv, label):
    y = torch.tensor([label])
    identity = nn.Identity()
    context = make_context(z, None, given_points(z_adv))
    without = mart(identity, z, y, context, weight=0.0)[0].item()
    fitted = cross_entropy(z_adv, y).item()
    assert without >= fitted - 1e-9
    assert mart(identity, z, y, make_context(z, None, given_points(z_adv)))[0].item() >= without - 1e-9


def test_mart_gives_no_weight_to_the_divergence_of_sure_and_right_inputs():
    identity, y = nn.Identity(), torch.tensor([0])
    z, z_adv = torch.tensor([[40.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    losses = [
        mart(identity, z, y, make_context(z, None, given_points(z_adv)), weight=w)[0].item() for w in (0.0, 100.0)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    doubt = torch.tensor([[-2.0, 0.0, 0.0]])
    context = make_context(z, None, given_points(z_adv))
    assert mart(identity, doubt, y, context, weight=100.0)[0].item() > losses[0] + 1


def test_mart_is_finite_where_the_wrong_class_is_certain():
    z = torch.tensor([[0.0, 200.0]], requires_grad=True)
    loss, _ = mart(nn.Identity(), z, torch.tensor([0]), make_context(z, None, given_points(z)))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()
    z = torch.tensor([[0.3, -0.2, 0.9]])
    s = z.softmax(1)
    assert margin_loss(z, torch.tensor([0])).item() == pytest.approx(-torch.log(1 - s[0, 2]).item(), rel=1e-5)
    assert margin_loss(z, torch.tensor([2])).item() == pytest.approx(-torch.log(1 - s[0, 0]).item(), rel=1e-5)
