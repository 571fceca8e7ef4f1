"""What attacks maximise, against values worked out by hand."""

import math

import pytest
import torch

from holdfast.attacks.core.losses import (
    cross_entropy,
    dlr,
    likely_targets,
    margin,
    targeted_cross_entropy,
    targeted_dlr,
    targeted_margin,
)

LOGITS = torch.tensor([[1.0, 5.0, -2.0, 3.0, 0.5]], dtype=torch.float64)
"""Sorted: 5, 3, 1, 0.5, -2."""


def at(loss, *classes):
    return float(loss(LOGITS, *(torch.tensor([c]) for c in classes)))


def test_the_cross_entropy_is_the_negative_log_of_the_softmax():
    total = sum(math.exp(z) for z in LOGITS[0].tolist())
    assert at(cross_entropy, 3) == pytest.approx(math.log(total) - 3, rel=1e-12)
    assert at(targeted_cross_entropy, 3, 0) == pytest.approx(1 - math.log(total), rel=1e-12)


def test_the_margin_is_the_best_other_logit_above_that_of_the_label():
    assert [at(margin, y) for y in range(5)] == [4.0, -2.0, 7.0, 2.0, 4.5]
    assert at(targeted_margin, 0, 3) == 2.0
    assert at(targeted_margin, 3, 0) == -2.0


def test_dlr_divides_the_margin_by_the_distance_of_the_first_logit_from_the_third():
    # z_(1) - z_(3) = 5 - 1 = 4, whatever the label.
    assert [at(dlr, y) for y in range(5)] == pytest.approx([1.0, -0.5, 1.75, 0.5, 1.125], rel=1e-12)


def test_targeted_dlr_divides_by_the_distance_of_the_first_logit_from_the_mean_of_the_third_and_the_fourth():
    # z_(1) - (z_(3) + z_(4)) / 2 = 5 - (1 + 0.5) / 2 = 4.25.
    assert at(targeted_dlr, 3, 0) == pytest.approx(-2 / 4.25, rel=1e-12)
    assert at(targeted_dlr, 2, 1) == pytest.approx(7 / 4.25, rel=1e-12)


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 7.0), (100.0, 0.0), (0.01, -3.0)])
def test_neither_ratio_depends_on_shift_or_scale_of_the_logits_and_the_margin_does(scale, shift):
    y, target, other = torch.tensor([3]), torch.tensor([0]), scale * LOGITS + shift
    torch.testing.assert_close(dlr(other, y), dlr(LOGITS, y))
    torch.testing.assert_close(targeted_dlr(other, y, target), targeted_dlr(LOGITS, y, target))
    torch.testing.assert_close(margin(other, y), scale * margin(LOGITS, y))


def test_with_too_few_classes_for_the_ratio_the_difference_is_left():
    y, target = torch.tensor([0]), torch.tensor([1])
    assert float(dlr(LOGITS[:, :2], y)) == 4.0
    assert float(targeted_dlr(LOGITS[:, :3], y, target)) == 4.0


def test_targets_are_the_other_classes_from_the_likeliest_on():
    assert likely_targets(LOGITS, torch.tensor([3])).tolist() == [[1, 0, 4, 2]]
    assert likely_targets(LOGITS, torch.tensor([1]), 2).tolist() == [[3, 0]]
