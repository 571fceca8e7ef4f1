"""Pyramid perturbations against their definitions."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from holdfast import InputError
from holdfast.training.objectives.core.pyramid import (
    Pyramid,
    ascend,
    level_gradients,
    make_pyramid,
    perturbation,
    radius_at,
    spread,
)

PYRAMID = Pyramid((4, 2, 1), (20.0, 10.0, 1.0))


def drawn(radius=0.1):
    torch.manual_seed(0)
    return [radius * (2 * torch.rand(2, 3, 8 // s, 12 // s, dtype=torch.float64) - 1) for s in PYRAMID.tiles]


def test_a_level_is_constant_on_its_tiles():
    level = torch.arange(6.0).view(1, 1, 2, 3)
    full = spread(level, 4)
    assert full.shape == (1, 1, 8, 12)
    for i, j in itertools.product(range(8), range(12)):
        assert full[0, 0, i, j] == level[0, 0, i // 4, j // 4]


def test_the_sum_of_levels_is_the_definition_and_within_its_bound():
    levels = drawn()
    delta = perturbation(PYRAMID, levels)
    for i, j in itertools.product(range(8), range(12)):
        terms = [m * v[:, :, i // s, j // s] for v, s, m in zip(levels, *vars(PYRAMID).values(), strict=True)]
        assert torch.allclose(delta[:, :, i, j], sum(terms))
    assert delta.abs().max() <= 0.1 * 31
    ones = [torch.full_like(level, 0.1) for level in levels]
    assert torch.allclose(perturbation(PYRAMID, ones), torch.tensor(3.1, dtype=torch.float64))


def test_gradients_of_levels_are_those_of_autograd():
    levels = [level.requires_grad_(True) for level in drawn()]
    weight = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    expected = torch.autograd.grad((perturbation(PYRAMID, levels).square() * weight).sum(), levels)
    gradient = 2 * perturbation(PYRAMID, levels).detach() * weight
    for found, true in zip(level_gradients(PYRAMID, gradient), expected, strict=True):
        assert torch.allclose(found, true)


def test_ascent_stays_in_the_radius_and_comes_back_from_its_edge():
    levels = [torch.tensor([[[[0.09, -0.1]]]])]
    up = ascend(levels, [torch.tensor([[[[3.0, 5.0]]]])], 0.05, 0.1)
    assert torch.allclose(up[0], torch.tensor([0.1, -0.05]))
    assert torch.allclose(ascend(up, [-torch.ones(1, 1, 1, 2)], 0.05, 0.1)[0], torch.tensor([0.05, -0.1]))


def test_the_radius_falls_linearly_and_stays():
    radii = [radius_at(e, 0.5, start=30, end=300, final=0.1) for e in range(320)]
    assert radii[:31] == [0.5] * 31
    assert radii[300] == pytest.approx(0.05)
    assert radii[300:] == [radii[300]] * 20
    assert radii == sorted(radii, reverse=True)
    assert radii[100] == pytest.approx(0.5 + (0.05 - 0.5) * 70 / 270)
    assert radius_at(1000, 0.5, start=30, end=None, final=0.1) == 0.5
    with pytest.raises(InputError, match="decay_end: expected an epoch after decay_start = 30, got 20"):
        radius_at(0, 0.5, start=30, end=20, final=0.1)


def test_default_levels_are_the_published_ones_in_proportion():
    assert make_pyramid((3, 224, 224), None, None) == Pyramid((32, 16, 1), (20.0, 10.0, 1.0))
    assert make_pyramid((3, 32, 32), None, None) == Pyramid((4, 2, 1), (20.0, 10.0, 1.0))
    assert make_pyramid((1, 6, 5), None, None) == Pyramid((1,), (1.0,))


@pytest.mark.parametrize(
    ("shape", "levels", "multipliers", "message"),
    [
        ((3, 8, 12), (4, 3), (1.0, 1.0), r"tiles of 3 x 3 do not divide an image of 8 x 12; choose divisors of 4"),
        ((3, 8, 8), (4, 1), (1.0,), "expected one for each of the 2 levels, got 1"),
        ((3, 8, 8), (4, 4), (1.0, 1.0), "expected different tiles"),
        ((3, 8, 8), (), (), "expected at least one level"),
        ((3, 8, 8), None, (1.0,), "needs objective.levels"),
        ((7,), None, None, r"images of shape \(C, H, W\)"),
    ],
)
def test_bad_pyramids_are_refused(shape, levels, multipliers, message):
    with pytest.raises(InputError, match=message):
        make_pyramid(shape, levels, multipliers)


def test_the_universal_maximum_is_at_most_the_mean_of_maxima():
    """max of a mean <= mean of maxima: (6.4) <= (6.2) of the thesis, on five points and three candidates."""
    for seed in range(20):
        torch.manual_seed(seed)
        model, x, y = nn.Linear(4, 3), torch.rand(5, 4), torch.randint(3, (5,))
        with torch.no_grad():
            losses = torch.stack(
                [
                    cross_entropy(model(x), y, reduction="none") + cross_entropy(model(x + d), y, reduction="none")
                    for d in torch.randn(3, 4)
                ]
            )
        assert losses.mean(1).max() <= losses.max(0).values.mean() + 1e-6
