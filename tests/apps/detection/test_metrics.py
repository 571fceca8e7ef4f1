"""Worst overlap, counts and average precision, measured and proved."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.apps.detection import (
    Counts,
    Encoding,
    SmoothedDetector,
    average_precision,
    certified_count,
    certified_curve,
    count,
    curve,
    iou,
    worst_iou,
)
from holdfast.apps.detection.smoothed_detector import CertifiedDetections
from holdfast.errors import InputError

BOX = torch.tensor([[2.0, 3, 8, 11]])
TRUTH = [(torch.tensor([[2.0, 3, 8, 11], [20, 3, 28, 12]]), torch.tensor([0, 1]))]


def random_bounds(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    corner, extent = 5 * torch.rand(count, 2, generator=g), 2 + 6 * torch.rand(count, 2, generator=g)
    middle = torch.cat([corner, corner + extent], 1)
    width = 2.5 * torch.rand(count, 4, generator=g)
    truth = middle + torch.randn(count, 4, generator=g)
    truth[:, 2:] = torch.maximum(truth[:, 2:], truth[:, :2] + 0.5)
    return middle - width, middle + width, truth


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_worst_iou_is_the_least_over_all_boxes_between(seed):
    lower, upper, truth = random_bounds(seed, 40)
    worst = worst_iou(lower, upper, truth)
    inside = torch.rand(400, 40, 4, generator=torch.Generator().manual_seed(seed))
    boxes = lower + inside * (upper - lower)
    proper = (boxes[..., 2:] > boxes[..., :2]).all(-1)
    sampled = torch.where(proper, iou(boxes, truth), 0.0)
    assert bool((worst <= sampled.amin(0) + 1e-6).all())
    ends = torch.stack([lower, upper])
    reached = torch.stack([iou(ends[list(k), :, range(4)].T, truth) for k in itertools.product((0, 1), repeat=4)]).amin(
        0
    )
    possible = (lower[:, 2:] > upper[:, :2]).all(1)
    assert torch.allclose(worst[possible], reached[possible])
    assert bool((worst[~possible] == 0).all())
    assert bool((worst_iou(lower - 0.2, upper + 0.2, truth) <= worst + 1e-6).all())
    swap = [1, 0, 3, 2]
    assert torch.allclose(worst_iou(lower[:, swap], upper[:, swap], truth[:, swap]), worst)


def test_worst_iou_without_width_is_iou_and_infinite_bounds_give_zero():
    lower, _, truth = random_bounds(0, 5)
    assert torch.allclose(worst_iou(lower, lower, truth), iou(lower, truth))
    for column in range(4):
        low, high = BOX.clone(), BOX.clone()
        low[0, column] = -torch.inf
        high[0, (column + 1) % 4] = torch.inf
        assert worst_iou(low, BOX, BOX).item() == 0
        assert worst_iou(BOX, high, BOX).item() == 0
    assert worst_iou(torch.full((2, 4), torch.inf), torch.full((2, 4), torch.inf), BOX).tolist() == [0, 0]
    assert worst_iou(torch.zeros(0, 1, 4), torch.zeros(0, 1, 4), TRUTH[0][0][None]).shape == (0, 2)


def detection(box: list[float], label: int, objectness: float = 1.0) -> list[float]:
    return [*box, objectness, 1.0, label]


def test_counts_need_label_and_overlap_and_use_each_object_once():
    good, right = detection([2, 3, 8, 11], 0), detection([20, 3, 28, 12], 1)
    cases = [
        ([good, right], 2),
        ([good, good], 1),  # one object, two detections
        ([detection([2, 3, 8, 11], 1)], 0),  # wrong label
        ([detection([2, 3, 8, 7], 0)], 1),  # overlap of exactly one half counts
        ([detection([2, 3, 8, 6.9], 0)], 0),
        ([], 0),
    ]
    for found, expected in cases:
        counts = count([torch.tensor(found).view(-1, 7)], TRUTH)
        assert counts == Counts(expected, 2, len(found))
        assert counts.recall == expected / 2
    assert count([torch.zeros(0, 7)], TRUTH).precision == 1


def test_matching_is_the_largest_not_the_first():
    objects = torch.tensor([[0.0, 0, 10, 10], [2, 0, 12, 10]])
    truth = [(objects, torch.zeros(2, dtype=torch.int64))]
    # The first detection fits both objects, the second one only the first of them.
    found = torch.tensor([detection([0, 0, 11, 10], 0, 0.9), detection([-2, 0, 8, 10], 0, 0.8)])
    assert (iou(found[:, None, :4], objects) >= 0.6).tolist() == [[True, True], [True, False]]
    assert count([found], truth, tau=0.6).found == 2


def certified(lower: list[list[float]], upper: list[list[float]]) -> CertifiedDetections:
    low, high = (torch.tensor(rows).view(-1, 5) for rows in (lower, upper))
    return CertifiedDetections(low, high, torch.zeros(len(low), 7), torch.zeros(len(low)), 0.1, 0.25, 100, 0.999)


def test_certified_counts_take_every_slot_that_may_be_filled():
    inf = float("inf")
    sure = [2.0, 3, 8, 11, 0]
    one = certified([sure], [sure])
    assert certified_count([one], TRUTH) == Counts(1, 2, 1)
    # A slot that may be filled lowers precision only; one that is proved empty changes nothing. Counting the slots that
    # are surely filled instead, as the text of the paper has it, would give a precision of one here.
    unsure = certified([sure, [20.0, 3, 28, 12, 1]], [sure, [inf] * 5])
    assert certified_count([unsure], TRUTH) == Counts(1, 2, 2)
    empty = certified([sure, [inf] * 5], [sure, [inf] * 5])
    assert certified_count([empty], TRUTH) == Counts(1, 2, 1)
    # Not proved: the label may change, a bound does not exist, the box may move too far.
    for low, high in (
        (sure, [2.0, 3, 8, 11, 1]),
        ([-inf] * 5, sure),
        ([2.0, 3, 5, 11, 0], [5.0, 3, 8, 11, 0]),
    ):
        assert certified_count([certified([low], [high])], TRUTH) == Counts(0, 2, 1)


def test_average_precision_is_a_staircase_and_rises_with_its_points():
    falling = [Counts(2, 10, 2), Counts(4, 10, 8), Counts(6, 10, 24)]
    assert average_precision(falling) == pytest.approx(0.2 * 1 + 0.2 * 0.5 + 0.2 * 0.25)
    assert average_precision(falling[::-1]) == average_precision(falling)
    assert average_precision([Counts(0, 3, 0)]) == 0
    # With the plain staircase, a smaller recall of the worse point would raise the area: 0.2 becomes 0.52.
    before, after = [Counts(5, 10, 25), Counts(6, 10, 6)], [Counts(1, 10, 5), Counts(6, 10, 6)]
    assert average_precision(after) <= average_precision(before)


@settings(max_examples=30, deadline=None)
@given(
    points=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), max_size=5)
)
def test_worse_points_never_have_more_area(points):
    better = [Counts(found, 9, found + extra) for found, extra, _, _ in points]
    worse = [
        Counts(max(0, found - lost), 9, found + extra + more) if found else Counts(0, 9, extra + more)
        for found, extra, lost, more in points
    ]
    assert average_precision(worse) <= average_precision(better) + 1e-12


def shaky(images: Tensor) -> list[Tensor]:
    """Two objects whose boxes shake with the image, and whose objectness does."""
    shake = images.flatten(1).mean(1) - 0.5
    return [
        torch.tensor(
            [
                detection([2 + 20 * s, 3, 8 + 20 * s, 11], 0, min(1.0, max(0.0, 0.7 + s))),
                detection([20, 3 - 30 * s, 28, 12 - 30 * s], 1, min(1.0, max(0.0, 0.3 + 2 * s))),
            ]
        )
        for s in shake.tolist()
    ]


def test_proved_figures_lie_below_the_measured_ones_and_meet_them_without_noise():
    x = torch.full((4, 1, 8, 8), 0.5) + torch.linspace(-0.02, 0.02, 4).view(-1, 1, 1, 1)
    truth = TRUTH * 4
    draws = SmoothedDetector(shaky, 0.25, n=200, encoding=Encoding("label")).draw(x)
    clean = average_precision(curve(draws, truth))
    areas = [average_precision(certified_curve(draws, truth, epsilon)) for epsilon in (0.0, 0.05, 0.15, 0.4)]
    assert max(areas) <= clean
    assert areas == sorted(areas, reverse=True)
    assert areas[-1] < areas[1]
    still = SmoothedDetector(shaky, 1e-6, n=200, encoding=Encoding("label")).draw(x)
    assert average_precision(certified_curve(still, truth, 0.0)) == average_precision(curve(still, truth)) > 0.5
    for plain, proved in zip(curve(draws, truth), certified_curve(draws, truth, 0.05), strict=True):
        assert proved.recall <= plain.recall
        assert proved.precision <= plain.precision


def test_bad_truth_is_refused():
    nothing = [(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))]
    found = [torch.zeros(0, 7)]
    with pytest.raises(InputError, match="no image has an object"):
        count(found, nothing)
    with pytest.raises(InputError, match="detections for 1 images but true boxes for 2"):
        count(found, TRUTH * 2)
    with pytest.raises(InputError, match=r"boxes \(K, 4\) and labels \(K,\)"):
        count(found, [(torch.zeros(2, 4), torch.zeros(3).long())])
    with pytest.raises(InputError, match="tau is an overlap"):
        count(found, TRUTH, tau=0.0)


def test_one_detection_finds_one_object_even_where_it_overlaps_two():
    box = torch.tensor([[0.0, 0, 10, 10]])
    one = torch.tensor([[0.0, 0, 10, 10, 0.9, 0.9, 1]])
    two_objects = [(box.repeat(2, 1), torch.tensor([1, 1]))]
    assert count([one], two_objects) == Counts(found=1, objects=2, detections=1)
    assert count([one.repeat(3, 1)], two_objects) == Counts(found=2, objects=2, detections=3)
