"""FMN: exact on linear models; the projection onto balls of one radius for each input."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.losses import margin
from holdfast.attacks.core.minimum_norm import BALLS, annealed, norm_of
from holdfast.attacks.fmn import fmn, fmn_nearest, shrink_to_ball
from holdfast.errors import InputError

WIDE = {"low": -1e6, "high": 1e6}


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@given(seed=st.integers(0, 10_000))
def test_the_projection_onto_a_ball_of_each_inputs_own_radius(norm, seed):
    g = torch.Generator().manual_seed(seed)
    d = torch.randn(5, 2, 3, dtype=torch.float64, generator=g)
    radius = 3 * torch.rand(5, dtype=torch.float64, generator=g)
    moved = shrink_to_ball(d, radius, norm)
    assert bool((norm_of(moved, norm) <= radius + 1e-9).all())
    for i in range(5):
        one = BALLS[norm](float(radius[i]), **WIDE).project(d[i : i + 1], torch.zeros_like(d[:1]))
        assert torch.allclose(moved[i : i + 1], one, atol=1e-9)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("classes", [2, 5])
def test_the_distance_of_a_linear_boundary(norm, classes):
    model = nn.Linear(9, classes).double().eval()
    model.bias.data = -0.5 * model.weight.data.sum(1)  # all classes meet in the middle of the range
    x = 0.4 + 0.2 * torch.rand(20, 9, dtype=torch.float64)
    y = model(x).argmax(1)
    logits, weight = model(x).detach(), model.weight.detach()
    gap = logits.gather(1, y[:, None]) - logits
    slope = torch.stack([BALLS[norm](1.0).dual_norm(weight[y] - weight[j]) for j in range(classes)], 1)
    truth = torch.where(gap > 0, gap / slope, torch.inf).amin(1)
    near = truth < 0.3
    assert int(near.sum()) >= 3
    found = fmn_nearest(model, x, y, norm)
    assert bool((found.distance >= truth - 1e-9).all())
    # with more classes it may end at a boundary that is not the nearest
    slack = 0.05 if classes == 2 else 0.3
    assert torch.allclose(found.distance[near], truth[near], rtol=slack)


def test_a_boundary_behind_the_pixel_box_is_crossed():
    """Values that stop at the end of the range make every move shorter than the ball: it has to grow."""
    model = nn.Linear(20, 2).double().eval()
    model.weight.data = torch.ones(2, 20).double() * torch.tensor([[1.0], [-1.0]]).double()
    model.weight.data[:, 0] *= -1
    model.bias.data.zero_()
    x = torch.zeros(1, 20).double()
    x[0, 1] = 0.8
    y = torch.tensor([0])
    assert float(margin(model(x), y).detach()) < 0
    for norm, truth in (("linf", 0.4), ("l2", 0.8 / 2**0.5), ("l1", 0.8)):
        assert float(fmn_nearest(model, x, y, norm).distance) == pytest.approx(truth, rel=0.02)


def test_counts_are_exact_and_broken_inputs_leave():
    model, shape = tiny_nets()["cnn"]
    x = torch.rand(12, *shape)
    model[-1].bias.data -= model(x).detach().mean(0)  # all classes within reach
    y = model(x).argmax(1)
    found = fmn_nearest(model, x, y, "l2", steps=9)
    assert found.gradients.tolist() == [9] * 12
    assert found.queries.tolist() == [10] * 12
    result = fmn(model, x, y, hf.L2(3.0))
    assert bool(result.success.all())
    assert int(result.queries.max()) < 50


def test_annealing_goes_from_the_first_value_to_the_last():
    assert annealed(1.0, 0.01, 0, 5) == pytest.approx(1.0)
    assert annealed(1.0, 0.01, 4, 5) == pytest.approx(0.01)
    assert annealed(1.0, 0.0, 2, 5) == pytest.approx(0.5)
    assert annealed(1.0, 0.01, 0, 1) == pytest.approx(1.0)


def test_bad_options_are_refused():
    model, x, y = nn.Linear(4, 3).eval(), torch.rand(2, 4), torch.zeros(2, dtype=torch.long)
    for options in ({"steps": 0}, {"alpha": 0.0}, {"gamma": 1.0}):
        with pytest.raises(InputError, match=f"'{next(iter(options))}' .*: expected"):
            hf.attack(model, x, y, hf.L2(0.1), "fmn", **options)
