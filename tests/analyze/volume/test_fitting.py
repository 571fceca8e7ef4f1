"""Questions to an optimiser: what is measured, which bin a loss is in, and what is refused."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.analyze.volume.fitting import bin_of, check_bins, make_bins, make_fitting

X, Y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 1, 1])


def linear():
    return nn.Sequential(nn.Linear(2, 2, bias=False))


def test_accuracy_and_loss_of_a_linear_model_by_hand():
    weights = torch.tensor([[3.0, 0.0, 0.0, 4.0], [0.0, 4.0, 3.0, 0.0]])
    accuracy, loss = make_fitting(linear(), X, Y, divisor=2.0).measure(weights)
    assert accuracy.tolist() == [1.0, 0.0]
    expected = cross_entropy(torch.tensor([[3.0, 0], [0, 4], [3, 4]]) * 2 / 5, Y)
    assert float(loss[0]) == pytest.approx(float(expected))
    raw = make_fitting(linear(), X, Y, divisor=None).measure(weights)[1]
    assert float(raw[0]) == pytest.approx(float(cross_entropy(torch.tensor([[3.0, 0], [0, 4], [3, 4]]), Y)))


def test_bins_are_open_below_and_closed_above():
    bins = make_bins(0.3, 0.65, 0.05)
    assert len(bins) == 7
    assert bins[-1] == (0.6, 0.65)
    assert bin_of(torch.tensor([0.3, 0.35, 0.351, 0.66, math.nan], dtype=torch.float64), bins).tolist() == [
        -1,
        0,
        1,
        -1,
        -1,
    ]


@pytest.mark.parametrize(
    ("x", "y", "divisor", "message"),
    [
        (X, torch.ones(3, dtype=torch.int64), 1.0, "all 3 labels are 1"),
        (X, torch.tensor([0, 1, 2]), 1.0, "label 2 of input 2 is outside"),
        (X[0], Y, 1.0, "must be a float batch"),
        (X.long(), Y, 1.0, "must be a float batch"),
        (X / 0, Y, 1.0, "sample 0 holds NaN"),
        (X, Y, 0.0, "divisor must be > 0"),
    ],
)
def test_bad_samples_are_refused(x, y, divisor, message):
    with pytest.raises(hf.InputError, match=message):
        make_fitting(linear(), x, y, divisor=divisor)


def test_bad_bins_are_refused():
    with pytest.raises(hf.InputError, match="low < high"):
        check_bins([(0.5, 0.5)])
    with pytest.raises(hf.InputError, match="must not overlap"):
        check_bins([(0.4, 0.5), (0.45, 0.6)])
    for step in (0.0, -0.1, 0.3):
        with pytest.raises(hf.InputError, match="divide the range"):
            make_bins(0.3, 0.65, step)
