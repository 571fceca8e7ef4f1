"""Overlap, suppression, and the encoding of detections as slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.apps.detection import Encoding, check_detections, decode, encode, flatten, iou, nms
from holdfast.errors import InputError

BINS = ("none", "label", "location", "location+label")
SIZE = (30, 60)  # not square


def random_detections(count: int, seed: int, *, labels: int = 3) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=g) * torch.tensor([50.0, 22.0])
    extent = 1 + 8 * torch.rand(count, 2, generator=g)
    scores = torch.rand(count, 2, generator=g)
    label = torch.randint(0, labels, (count, 1), generator=g)
    return torch.cat([corner, corner + extent, scores, label.float()], 1)


def pixels(box: list[int]) -> set[tuple[int, int]]:
    x1, y1, x2, y2 = box
    return {(x, y) for x in range(x1, x2) for y in range(y1, y2)}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 6)] * 4), min_size=2, max_size=2))
def test_iou_counts_pixels(corners):
    a, b = ([min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3])] for c in corners)
    union = pixels(a) | pixels(b)
    expected = len(pixels(a) & pixels(b)) / len(union) if union else 0.0
    assert iou(torch.tensor(a).float(), torch.tensor(b).float()).item() == pytest.approx(expected, abs=1e-6)
    # With one pixel more on each side it counts the closed boxes.
    a1, b1 = (pixels([x1, y1, x2 + 1, y2 + 1]) for x1, y1, x2, y2 in (a, b))
    plus = iou(torch.tensor(a).float(), torch.tensor(b).float(), plus_one=True)
    assert plus.item() == pytest.approx(len(a1 & b1) / len(a1 | b1), abs=1e-6)


def slow_nms(rows: list[list[float]], objectness: float, threshold: float) -> list[list[float]]:
    left = sorted((r for r in rows if r[4] >= objectness), key=lambda r: (-r[4] * r[5], r[6], *r[:4]))
    kept: list[list[float]] = []
    while left:
        best = left.pop(0)
        kept.append(best)
        box = torch.tensor(best[:4])
        left = [r for r in left if r[6] != best[6] or iou(box, torch.tensor(r[:4])) <= threshold]
    return kept


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(0, 12), objectness=st.sampled_from([0.0, 0.3]))
def test_nms_is_the_loop_idempotent_and_order_independent(seed, count, objectness):
    found = random_detections(count, seed, labels=2)
    found[:, :4] = found[:, :4] / torch.tensor([4.0, 2.0, 4.0, 2.0])  # close together
    found[:, 2:4] = torch.maximum(found[:, 2:4], found[:, :2])
    other = random_detections(count, seed + 1)
    kept, kept_other = nms(torch.stack([found, other]), objectness=objectness)
    expected = slow_nms(found.tolist(), objectness, 0.4)
    assert kept.tolist() == expected
    assert kept_other.tolist() == slow_nms(other.tolist(), objectness, 0.4)
    assert torch.equal(nms(kept[None], objectness=objectness)[0], kept)
    shuffled = found[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
    padding = torch.zeros(3, 7)
    padding[:, 4] = -1
    assert torch.equal(nms(torch.cat([padding, shuffled])[None], objectness=objectness)[0], kept)


def test_nms_breaks_ties_by_place_and_spares_other_classes():
    one = torch.tensor([0.0, 0, 4, 4, 0.8, 0.5, 1])
    twin, other = one + torch.tensor([0.5, 0, 0.5, 0, 0, 0, 0]), one.clone()
    other[6] = 2
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        kept = nms(torch.stack([one, twin, other])[order][None])[0]
        assert kept.tolist() == [one.tolist(), other.tolist()]
    assert [each.shape for each in nms(torch.zeros(0, 4, 7))] == []
    assert [each.shape for each in nms(torch.zeros(2, 0, 7))] == [(0, 7), (0, 7)]


def test_bad_detections_are_refused():
    good = random_detections(2, 0)
    check_detections([good, torch.zeros(0, 7)], 2)
    check_detections([], 0)
    nan, crossed, label, endless = (good.clone() for _ in range(4))
    nan[1, 0] = torch.nan
    endless[0, 2] = torch.inf
    crossed[0, 2] = crossed[0, 0] - 1
    label[0, 6] = -1
    for bad, message in (
        ([nan], "NaN or infinite values for image 0"),
        ([good, endless], "NaN or infinite values for image 1"),
        ([crossed], "x1 <= x2 and y1 <= y2"),
        ([label], "label -1; labels are whole numbers"),
        ([good[:, :5]], r"shape \(N, 7\).*got \(2, 5\) for image 0"),
        ([None], "got NoneType for image 0"),
    ):
        with pytest.raises(InputError, match=message):
            check_detections(bad, len(bad))
    with pytest.raises(InputError, match=r"list of 3 tensors.*got 1 of them"):
        check_detections([good], 3)
    with pytest.raises(InputError, match="got Tensor"):
        check_detections(good, 1)
    with pytest.raises(InputError, match=r"shape \(B, N, 7\)"):
        nms(good)
    with pytest.raises(InputError, match="NaN among the candidate"):
        nms(nan[None])


def rows(values: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in values.tolist()}


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), bins=st.sampled_from(BINS), sort=st.sampled_from(["objectness", "location"]))
def test_encoding_keeps_the_set_and_forgets_the_order(seed, bins, sort):
    encoding = Encoding(bins, sort)
    images = [random_detections(n, seed + n) for n in (4, 0, 7)]
    slots, of = encode(flatten(images), SIZE, encoding)
    assert slots.shape == (3, len(of), 7)
    for i, found in enumerate(images):
        assert rows(decode(slots[i])) == rows(found)
        assert bool((torch.isfinite(slots[i]).all(1) == torch.isfinite(slots[i]).any(1)).all())
    shuffled = [each.flip(0) for each in images]
    assert torch.equal(encode(flatten(shuffled), SIZE, encoding)[0], slots)
    # Every bin is as large as its fullest image, and filled from the front.
    filled = torch.isfinite(slots[..., 0])
    for b in of.unique():
        part = filled[:, of == b]
        assert bool(part.any(0).all())
        assert bool((part.int().diff(dim=1) <= 0).all())
    if bins == "label":  # the label is constant in a slot, or +inf
        for k in range(len(of)):
            assert len(slots[filled[:, k], k, 6].unique()) == 1


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), bins=st.sampled_from(BINS[1:]))
def test_deleting_an_object_changes_only_its_bin(seed, bins):
    found = random_detections(6, seed)
    slots, of = encode(flatten([found, found[1:]]), SIZE, Encoding(bins))
    _, (own, *_) = encode(flatten([found[:1]]), SIZE, Encoding(bins))
    changed = (slots[0] != slots[1]).any(1)
    assert bool(changed.any())
    assert of[changed].unique().tolist() == [own.item()]


def test_sorting_goes_left_to_right_then_down_or_by_objectness():
    found = torch.tensor(
        [[4.0, 0, 6, 2, 0.3, 0.9, 0], [0, 4, 2, 6, 0.5, 0.1, 0], [0, 0, 2, 2, 0.5, 0.7, 0], [9, 0, 9.5, 2, 0.9, 0.2, 0]]
    )
    by_place = encode(flatten([found]), SIZE, Encoding("none", "location"))[0][0]
    assert by_place.tolist() == found[[2, 1, 0, 3]].tolist()
    by_score = encode(flatten([found]), SIZE, Encoding("none", "objectness"))[0][0]
    assert by_score.tolist() == found[[3, 2, 1, 0]].tolist()


def test_location_bins_follow_both_sides_and_hold_centres_outside():
    centres = [(0.0, 0.0), (59.0, 29.0), (30.0, 15.0), (-40.0, 100.0), (19.9, 10.1)]
    found = torch.tensor([[x - 1, y - 1, x + 1, y + 1, 1.0, 1.0, 0.0] for x, y in centres])
    cells = [encode(flatten([row[None]]), SIZE, Encoding("location"))[1].item() for row in found]
    assert cells == [0, 8, 4, 6, 3]
    with_label = found[:1].clone()
    with_label[0, 6] = 2
    assert encode(flatten([with_label]), SIZE, Encoding("location+label"))[1].item() == 18


def test_no_detections_make_no_slots():
    slots, of = encode(flatten([torch.zeros(0, 7)] * 3), SIZE, Encoding())
    assert (slots.shape, of.shape) == ((3, 0, 7), (0,))


def test_bad_encodings_are_refused():
    with pytest.raises(InputError, match="bins must be one of none, label"):
        Encoding("place")
    with pytest.raises(InputError, match="sort must be"):
        Encoding(sort="score")
    with pytest.raises(InputError, match="at least 1 cell"):
        Encoding(grid=0)


def test_a_box_that_was_suppressed_suppresses_none():
    """A row of three boxes: the first beats the second, which would have beaten the third."""
    rows = [[10.0 * i, 0, 10.0 * i + 20, 10, 0.9, 0.9 - 0.1 * i, 2] for i in range(3)]
    (kept,) = nms(torch.tensor([rows]), threshold=0.3)  # neighbours overlap by 1/3
    assert kept[:, 0].tolist() == [0.0, 20.0]
