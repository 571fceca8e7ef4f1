import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data import Split, split_validation
from holdfast.data.dataset import Arrays, make_dataset, make_split
from holdfast.errors import InputError


def arrays(n: int = 3, **changes: object) -> Arrays:
    x = np.linspace(0, 255, n * 1 * 2 * 5).astype(np.uint8).reshape(n, 1, 2, 5)
    return Arrays(x, np.arange(n), "file")._replace(**changes)


def test_bytes_become_floats_in_unit_range() -> None:
    data = make_dataset("d", arrays(), arrays(2))
    assert data.train.x.dtype == torch.float32
    assert data.train.x.flatten()[-1] == 1.0
    assert torch.equal((data.train.x * 255).round().byte(), torch.from_numpy(arrays().x))
    assert data.train.y.dtype == torch.int64
    assert (data.name, len(data.train), len(data.test), data.classes) == ("d", 3, 2, ("0", "1", "2"))
    assert data.train.boxes is None


def test_floats_are_taken_as_they_are_and_copied() -> None:
    x = np.full((2, 1, 2, 5), 0.25)
    split = make_split(Arrays(x, np.array([[1], [0]], dtype=np.uint8), "file"), 2)
    x[:] = 0
    assert split.x.dtype == torch.float32
    assert bool((split.x == 0.25).all())
    assert split.y.tolist() == [1, 0]


def test_selection_takes_boxes_along() -> None:
    boxes = np.array([[0, 0, 1, 1], [1, 0, 5, 2], [0, 1, 3, 2]])
    split = make_split(arrays(boxes=boxes))
    assert split.boxes is not None
    assert split[1:].boxes is not None
    assert torch.equal(split[1:].boxes, split.boxes[1:])
    assert split[torch.tensor([2, 0])].y.tolist() == [2, 0]
    assert len(split[split.y == 1]) == 1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (arrays(x=np.full((3, 1, 2, 5), np.nan)), "input 0 holds NaN"),
        (arrays(x=np.full((3, 1, 2, 5), 200.0)), "outside the valid range"),
        (arrays(x=np.zeros((3, 1, 2, 5), dtype=np.int32)), "uint8 in 0 to 255 or float"),
        (arrays(x=np.zeros((0, 1, 2, 5), dtype=np.uint8), y=np.zeros(0, dtype=int)), "empty"),
        (arrays(y=np.array([0, 1])), r"shape \(3,\), one label per input, got \(2,\)"),
        (arrays(y=np.zeros((3, 2), dtype=int)), r"shape \(3,\)"),
        (arrays(y=np.array([0, -1, 1])), "label -1 of input 1"),
        (arrays(y=np.array([0, 1, 4])), "label 4 of input 2 is outside the classes 0 to 3"),
        (arrays(y=np.array([0.0, 1.0, 1.0])), "labels must be integers"),
        (arrays(boxes=np.zeros((2, 4))), r"shape \(3, 4\)"),
        (arrays(boxes=np.array([[0, 0, 5, 2], [0, 0, 6, 2], [0, 0, 1, 1]])), "of input 1 must satisfy"),
        (arrays(boxes=np.array([[0, 0, 5, 2], [3, 0, 3, 2], [0, 0, 1, 1]])), "of input 1 must satisfy"),
        (arrays(boxes=np.array([[0, 0, 5, np.nan]] * 3)), "of input 0 must satisfy"),
    ],
)
def test_bad_split_is_refused_by_name(part: Arrays, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make_split(part, 4)
    assert str(caught.value).startswith("file: ")


def test_absurd_label_without_class_names_is_refused() -> None:
    with pytest.raises(InputError, match="label 1000000000"):
        make_dataset("d", arrays(y=np.array([0, 1, 10**9])), arrays())


def test_splits_of_different_shape_are_refused() -> None:
    with pytest.raises(InputError, match=r"\(1, 2, 5\).*\(1, 5, 2\)"):
        make_dataset("d", arrays(), arrays(x=arrays().x.reshape(3, 1, 5, 2)))


@given(
    counts=st.lists(st.integers(2, 20), min_size=1, max_size=5),
    fraction=st.floats(0.3, 0.7),
    seed=st.integers(-(2**40), 2**40),
)
def test_validation_is_a_stratified_partition(counts: list[int], fraction: float, seed: int) -> None:
    y = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    split = Split(torch.arange(len(y))[:, None] / len(y), y)
    rest, held = split_validation(split, fraction, seed)
    again = split_validation(split, fraction, seed)
    assert torch.equal(held.x, again[1].x)
    assert torch.equal(torch.cat([rest.x, held.x]).sort(0).values, split.x)
    assert bool((held.x.diff(dim=0) > 0).all())
    for label, count in enumerate(counts):
        assert int((held.y == label).sum()) == round(fraction * count)


def test_seed_decides_validation() -> None:
    split = Split(torch.arange(100)[:, None] / 100, torch.zeros(100, dtype=torch.int64))
    first, second = (split_validation(split, 0.3, seed)[1].x for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_bad_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        split_validation(Split(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)), fraction)


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_empty_part_is_refused(fraction: float) -> None:
    with pytest.raises(InputError, match="leaves one part empty"):
        split_validation(Split(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)), fraction)
