"""Slopes that a gradient step chooses."""

import holdfast as hf
from certified_tasks import batch, net
from contexts import make_context
from holdfast.training.objectives.crown_ibp import crown_ibp
from holdfast.training.objectives.slope_step import slope_step


def test_optimised_slopes_are_no_worse_than_random_ones_on_average() -> None:
    model, (x, y) = net(seed=2), batch(64)
    context = make_context(64, hf.Linf(0.15))
    ours = slope_step(model, x, y, context, kappa_start=0.0)[0]
    random = crown_ibp(model, x, y, context, kappa_start=0.0, beta_end=1.0, slopes="random")[0]
    several = slope_step(model, x, y, context, kappa_start=0.0, steps=7, step_size=0.1)[0]
    assert ours <= random
    assert several <= random
