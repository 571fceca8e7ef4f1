"""RandAugment, crops, brightness and mixing, against slow references and by their symmetries."""

import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from holdfast import InputError
from holdfast.random import Noise
from holdfast.training import load_recipe, train
from holdfast.training.randaugment import (
    OPERATIONS,
    cutout,
    inception_crop,
    mixing_weights,
    randaugment,
    random_brightness,
)

NOISE = Noise(0, torch.arange(6))


def changed(name, x, strength, sign=1.0):
    one = torch.ones(len(x), 1, 1, 1, dtype=x.dtype)
    return OPERATIONS[name](x, strength * one, sign * one)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("shape", [(2, 3, 9, 12), (2, 1, 8, 8)])
def test_operations_keep_shape_and_do_little_at_strength_zero(name, shape):
    x = (255 * torch.rand(shape)).round() / 255
    for strength in (0.0, 1.0):
        assert changed(name, x, strength).shape == x.shape
    if name not in ("autocontrast", "equalize", "solarize"):
        assert torch.allclose(changed(name, x, 0.0), x, atol=1e-5)


def test_rotation_is_that_of_scipy():
    """On an image that is not square: the angle is in pixels, not in shares of the sides."""
    x = torch.full((1, 1, 15, 21), 0.5, dtype=torch.float64)
    x[0, 0, 4:11, 6:15] = torch.from_numpy(np.random.default_rng(0).random((7, 9)))
    expected = ndimage.rotate(x[0, 0].numpy(), 30, reshape=False, order=1, cval=0.5)
    assert np.allclose(changed("rotate", x, 1.0)[0, 0], expected, atol=1e-6)


def test_colours_by_their_definitions():
    x = torch.rand(2, 3, 5, 6)
    assert torch.allclose(changed("brightness", x, 0.5, -1.0), 0.55 * x)
    assert torch.allclose(changed("solarize", x, 0.4), torch.where(x >= 0.6, 1 - x, x))
    grey = (0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2])[:, None]
    assert torch.allclose(changed("color", x, 1.0, -1.0), 0.9 * grey + 0.1 * x, atol=1e-6)
    assert set((255 * changed("posterize", x, 1.0)).round().int().flatten().tolist()) <= set(range(0, 256, 16))
    stretched = changed("autocontrast", x, 1.0)
    assert torch.allclose(stretched.amin((2, 3)), torch.zeros(2, 3))
    ramp = torch.linspace(0, 1, 30).pow(3).view(1, 1, 5, 6)
    flat = changed("equalize", ramp, 1.0).flatten()
    assert torch.equal(flat.sort().values, flat)
    assert flat[-1] == 1


def test_draws_belong_to_the_image():
    x = torch.rand(6, 3, 8, 8)
    for change in (
        lambda x, noise: randaugment(x, noise, operations=2, magnitude=9.0),
        lambda x, noise: inception_crop(x, noise, least=0.08),
        lambda x, noise: random_brightness(x, noise, most=0.3),
        lambda x, noise: cutout(x, noise, side=3),
    ):
        whole = change(x, NOISE)
        assert torch.allclose(whole[2:4], change(x[2:4], NOISE[2:4]), atol=1e-6)
        assert not torch.equal(whole, x)
        assert ((whole >= 0) & (whole <= 1)).all()


def test_crops_and_brightness_do_nothing_at_their_ends():
    x = torch.rand(6, 3, 8, 10)
    shift = random_brightness(torch.full_like(x, 0.5), NOISE, most=0.3) - 0.5
    assert shift.abs().max() <= 0.3 + 1e-6
    assert torch.equal(random_brightness(x, NOISE, most=0.0), x)
    ramp = torch.linspace(0, 1, 40).expand(200, 1, 40, 40)
    crop = inception_crop(ramp, Noise(0, torch.arange(200)), least=0.25)
    seen = crop[:, 0, 20, -2] - crop[:, 0, 20, 1]
    assert 0.3 < seen.min() < 0.6
    assert seen.max() > 0.8


@pytest.mark.parametrize("side", [1, 3, 4])
def test_cutout_is_one_square_with_its_centre_anywhere(side):
    x = torch.zeros(4000, 2, 7, 9)
    cut = cutout(x, Noise(0, torch.arange(4000)), side=side) == 0.5
    assert torch.equal(cut[:, 0], cut[:, 1])
    cut = cut[:, 0]
    tall, wide = cut.any(2), cut.any(1)
    assert torch.equal(cut, tall[:, :, None] & wide[:, None])
    for along, length in ((tall, 7), (wide, 9)):
        steps = along.int().diff(dim=1)
        assert int((steps != 0).sum(1).max()) <= 2
        assert int((steps == 1).sum(1).max()) <= 1  # without a hole
        centres = torch.arange(length)  # the square reaches side // 2 back from its centre, side pixels in all
        ends = (centres - side // 2 + side).clamp(max=length) - (centres - side // 2).clamp(min=0)
        counts = along.sum(1).bincount(minlength=side + 1)
        expected = ends.bincount(minlength=side + 1) / length * len(x)
        assert torch.allclose(counts.float(), expected, atol=4 * 4000**0.5 / 2)


def test_cutout_reaches_the_loss(toy_recipe, make_toy_model, toy_data, add_objective):
    shares = []

    def watch(model, x, y, context):
        shares.append((x == 0.5).flatten(1).all(1).double().mean())
        return model(x).sum() * 0, {}

    add_objective("watch", watch)
    plain = {**toy_recipe, "attack": None, "threat": None, "epochs": 1, "evaluate": {"attack_steps": 0}}
    side = 2 * max(toy_data.train.x.shape[2:]) + 1  # covers the image from any centre
    for cut in (0, side):
        recipe = {**plain, "objective": {"name": "watch"}, "augment": {"cutout": cut}}
        train(recipe, make_toy_model(), toy_data)
        assert set(map(float, shares)) == {float(cut > 0)}
        shares.clear()


def test_weights_follow_the_beta_distribution():
    noise = Noise(0, torch.arange(4000))
    w = mixing_weights(noise, alpha=0.2, probability=1.0)
    folded = 2 * stats.beta(0.2, 0.2).cdf(w.numpy()) - 1  # uniform, as w is the larger of two halves
    assert stats.kstest(folded, "uniform").pvalue > 1e-3
    share = (mixing_weights(noise, alpha=1.0, probability=0.3) == 1).double().mean()
    assert share == pytest.approx(0.7, abs=0.03)


def test_mixed_labels_reach_the_loss(toy_recipe, make_toy_model, toy_data, add_objective):
    seen = []

    def watch(model, x, y, context):
        seen.append((x, y, context))
        return model(x).sum() * 0, {}

    add_objective("watch", watch)
    plain = {**toy_recipe, "attack": None, "threat": None, "epochs": 1, "evaluate": {"attack_steps": 0}}
    with pytest.raises(InputError, match=r"augment.mixup: mixes labels too"):
        load_recipe({**plain, "objective": {"name": "watch"}, "augment": {"mixup": 0.2}})
    same, mixed = (
        train({**plain, "objective": {"name": "standard"}, "augment": augment}, make_toy_model(), toy_data)
        for augment in ({"mixup": 0.2, "mixup_probability": 0.0}, {"mixup": 1.0})
    )
    bare = train({**plain, "objective": {"name": "standard"}}, make_toy_model(), toy_data)
    assert same.history[0]["train_loss"] == pytest.approx(bare.history[0]["train_loss"])
    assert mixed.history[0]["train_loss"] != bare.history[0]["train_loss"]
    everything = {"crop": 1, "flip": True, "inception": 0.3, "brightness": 0.1, "randaugment": 2, "mixup": 0.2}
    again = [
        train({**plain, "objective": {"name": "upat"}, "augment": everything}, make_toy_model(), toy_data).history[0]
        for _ in range(2)
    ]
    assert again[0]["train_loss"] == again[1]["train_loss"]
