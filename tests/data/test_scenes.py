import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data import Dataset, Split, detection_scenes, digit_scenes, list_data, load_data, mnist_mini
from holdfast.data.scenes import INK
from holdfast.errors import InputError


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return mnist_mini()


def test_scenes_come_by_name_with_boxes_and_all_classes() -> None:
    data = load_data("digit-scenes", n=300)
    for split in (data.train, data.test):
        assert split.x.shape == (300, 1, 48, 48)
        assert (split.x.dtype, split.y.dtype, split.boxes.dtype) == (torch.float32, torch.int64, torch.float32)
        assert 0 <= split.x.min() < split.x.max() <= 1
        assert split.y.unique().tolist() == list(range(10))
        x0, y0, x1, y1 = split.boxes.unbind(1)
        assert bool(((x0 >= 0) & (x0 < x1) & (x1 <= 48) & (y0 >= 0) & (y0 < y1) & (y1 <= 48)).all())
    assert data.classes == tuple("0123456789")
    assert "digit-scenes" in [info.name for info in list_data() if info.present]


def test_a_box_holds_the_digit_and_touches_its_ink(digits: Dataset) -> None:
    split = digit_scenes(4, scale=(1.0, 1.0), size=56, digits=digits).train
    originals = digits.train.x[:, 0]
    for i in range(4):
        x0, y0, x1, y1 = split.boxes[i].int().tolist()
        crop = split.x[i, 0, y0:y1, x0:x1]
        # At scale one the box holds the pixels of one digit of the pool, lightened where clutter lies over them.
        sizes = [(d > INK).nonzero().aminmax(dim=0) for d in originals[digits.train.y == split.y[i]]]
        boxes = [(low.tolist(), (high + 1).tolist()) for low, high in sizes]
        pool = originals[digits.train.y == split.y[i]]
        fits = [
            bool((crop >= pool[k, a[0] : b[0], a[1] : b[1]] - 1e-5).all())
            for k, (a, b) in enumerate(boxes)
            if (b[0] - a[0], b[1] - a[1]) == tuple(crop.shape)
        ]
        assert any(fits)


def test_the_digit_is_where_the_box_says(digits: Dataset) -> None:
    data = digit_scenes(300, digits=digits)
    inside, outside = [], []
    for x, box in zip(data.test.x[:, 0], data.test.boxes.int().tolist(), strict=True):
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask[box[1] : box[3], box[0] : box[2]] = True
        inside.append(x[mask].max())
        outside.append(x[~mask].max())
    assert torch.stack(inside).mean() > 0.95
    assert torch.stack(outside).max() < 0.85  # clutter is weaker than ink
    area = (data.test.boxes[:, 2:] - data.test.boxes[:, :2]).prod(1) / 48**2
    assert 0.05 < area.mean() < 0.25


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30))
def test_a_scene_depends_on_seed_and_index_alone(digits: Dataset, seed: int, n: int) -> None:
    few, many = digit_scenes(n, seed=seed, digits=digits), digit_scenes(130 if n % 2 else 30, seed=seed, digits=digits)
    assert torch.equal(few.train.y, many.train.y[:n])
    assert torch.equal(few.train.boxes, many.train.boxes[:n])
    assert torch.allclose(few.test.x, many.test.x[:n], atol=1e-6)
    other = digit_scenes(n, seed=seed + 1, digits=digits)
    assert not torch.equal(few.train.x, other.train.x)


def test_training_and_test_scenes_use_their_own_digits() -> None:
    x = torch.zeros(1, 1, 28, 28)
    x[..., 10:18, 9:21] = 1
    zero = Split(x, torch.zeros(1, dtype=torch.int64))
    one = Split(x, torch.ones(1, dtype=torch.int64))
    data = digit_scenes(5, digits=Dataset("own", zero, one, ("a", "b")), scale=(1.0, 1.0))
    assert data.train.y.tolist() == [0] * 5
    assert data.test.y.tolist() == [1] * 5
    assert (data.train.boxes[:, 2:] - data.train.boxes[:, :2]).tolist() == [[12.0, 8.0]] * 5
    twice = digit_scenes(5, digits=Dataset("own", zero, one, ("a", "b")), scale=(2.0, 2.0), size=60)
    width, height = (twice.train.boxes[:, 2:] - twice.train.boxes[:, :2]).unbind(1)
    assert bool(((width - 24).abs() <= 2).all())
    assert bool(((height - 16).abs() <= 2).all())


def test_detection_scenes_are_padded_and_do_not_overlap(digits: Dataset) -> None:
    scenes = detection_scenes(300, digits=digits, seed=2)
    assert scenes.x.shape == (300, 1, 48, 48)
    there = scenes.labels >= 0
    count = there.sum(1)
    assert sorted(count.unique().tolist()) == [1, 2, 3, 4]
    assert torch.equal(there, torch.arange(4) < count[:, None])  # objects come first
    assert bool((scenes.boxes[~there] == 0).all())
    for boxes, labels in scenes.objects():
        assert len(boxes) == len(labels) >= 1
        low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
        high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
        shared = (high - low).clamp(min=0).prod(2)
        assert bool((shared.fill_diagonal_(0) == 0).all())
    some = scenes[10:13]
    assert len(some) == 3
    assert torch.equal(some.boxes, scenes.boxes[10:13])
    test = detection_scenes(300, digits=digits, seed=2, split="test")
    assert not torch.equal(test.boxes, scenes.boxes)


def test_two_thousand_scenes_take_less_than_two_seconds(digits: Dataset) -> None:
    start = time.process_time()
    digit_scenes(1000, digits=digits)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n >= 1 scenes, got 0"),
        ({"size": 30}, "size 30 are too small"),
        ({"scale": (1.0, 0.5)}, "scale must be"),
        ({"scale": (float("nan"), 1.0)}, "scale must be"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str, digits: Dataset) -> None:
    with pytest.raises(InputError, match=message):
        digit_scenes(**{"n": 2, "digits": digits, **options})


def test_bad_detection_options_are_refused(digits: Dataset) -> None:
    with pytest.raises(InputError, match="'train' or 'test', got 'val'"):
        detection_scenes(2, split="val", digits=digits)
    with pytest.raises(InputError, match="at least one digit"):
        detection_scenes(2, most=0, digits=digits)
    points = Dataset("p", Split(torch.zeros(2, 2), torch.zeros(2).long()), digits.test, ("a",))
    with pytest.raises(InputError, match=r"digits must have shape \(N, 1, 28, 28\)"):
        detection_scenes(2, digits=points)
    with pytest.raises(InputError, match="option 'noise' is for two-moons"):
        load_data("digit-scenes", noise=0.1)
    with pytest.raises(InputError, match="option 'boxes' is for a folder"):
        load_data("digit-scenes", boxes="b.csv")
