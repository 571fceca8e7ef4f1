import pytest
import torch

from holdfast import InputError
from holdfast.random import Noise
from holdfast.training.augment import Transform, check_images, draw_transform


def slow_crop_and_flip(image, padding, offset, flipped):
    """One image, value by value."""
    channels, height, width = image.shape
    out = torch.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                row, column = i + int(offset[0]) - padding, (width - 1 - j if flipped else j) + int(offset[1]) - padding
                if 0 <= row < height and 0 <= column < width:
                    out[c, i, j] = image[c, row, column]
    return out


def test_matches_a_slow_reference_on_images_that_are_not_square():
    x = torch.rand(9, 2, 6, 4)
    transform = draw_transform(Noise(5, torch.arange(9)), crop=2, flip=True)
    for i in range(9):
        expected = slow_crop_and_flip(x[i], 2, transform.offset[i], transform.flipped[i])
        assert torch.equal(transform(x)[i], expected)


def test_draws_belong_to_the_image_not_to_the_batch():
    noise = Noise(1, torch.tensor([4, 8, 15, 16, 23, 42]))
    x = torch.rand(6, 1, 5, 5)
    whole = draw_transform(noise, crop=3, flip=True)(x)
    part = draw_transform(noise[2:4], crop=3, flip=True)(x[2:4])
    assert torch.equal(whole[2:4], part)


def test_every_offset_and_both_sides_occur():
    transform = draw_transform(Noise(0, torch.arange(500)), crop=1, flip=True)
    assert {tuple(pair) for pair in transform.offset.tolist()} == {(i, j) for i in range(3) for j in range(3)}
    assert 200 < int(transform.flipped.sum()) < 300


def test_nothing_asked_nothing_done():
    x = torch.rand(3, 7)
    assert draw_transform(Noise(0, torch.arange(3)), crop=0, flip=False)(x) is x
    assert Transform()(x) is x


def test_points_cannot_be_cropped():
    check_images((2,), needed=False)
    with pytest.raises(InputError, match=r"augment: .*shape \(2,\)"):
        check_images((2,), needed=True)
