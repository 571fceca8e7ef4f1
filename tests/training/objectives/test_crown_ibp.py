"""CROWN-IBP: its slopes, and how it follows the budget."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import holdfast as hf
from certified_tasks import CROWN, batch, net
from contexts import make_context
from holdfast.random import Noise
from holdfast.training.objectives.core.certified import certified_loss, interval_bound, linear_bound, mixed
from holdfast.training.objectives.crown_ibp import crown_ibp, slope_rule
from holdfast.training.objectives.ibp import ibp


def test_bernoulli_slopes_of_0_and_1_are_those_of_crown() -> None:
    model, (x, y) = net(), batch()
    drawn = linear_bound(1.0, slope_rule("bernoulli", 0.0, 1.0, Noise.for_batch(3, len(x))))
    assert torch.allclose(*(certified_loss(model, x, y, hf.Linf(0.2), bound)[2] for bound in (drawn, CROWN)))


def test_kappa_and_beta_move_with_the_budget() -> None:
    model, (x, y), threat = net(), batch(), hf.Linf(0.1)
    natural = cross_entropy(model(x), y).item()
    by_intervals, by_lines = (certified_loss(model, x, y, threat, b) for b in (interval_bound, CROWN))
    loss = ibp(model, x, y, make_context(5, threat, ramp=0.25), kappa_start=1.0, kappa_end=0.2)[0]
    assert loss.item() == pytest.approx(0.8 * natural + 0.2 * by_intervals[0].mean().item())
    loss = crown_ibp(model, x, y, make_context(5, threat, ramp=0.25), kappa_start=0.0, beta_start=1.0, beta_end=0.0)[0]
    both = 0.25 * by_intervals[2] + 0.75 * by_lines[2]
    assert loss.item() == pytest.approx(cross_entropy(-both, y).item())
    assert mixed(1.0, 0.0, make_context(5, threat, ramp=0.25)) == 0.75
