"""Fifteen corruptions: contract over the table, and each formula against another way to compute it."""

import numpy as np
import pytest
import torch
from scipy import fft, ndimage, stats

from holdfast import InputError
from holdfast.data.corruptions import CORRUPTIONS, corrupt
from holdfast.data.corruptions.blurs import disc
from holdfast.data.corruptions.digital import dct_matrix, jpeg
from holdfast.data.corruptions.filters import clouds, filtered, gaussian, line_kernels, mirrored_gaussian, zoomed
from holdfast.data.corruptions.noises import poisson
from holdfast.random import Noise


def images(count=4, channels=3, height=20, width=16):
    """Smooth pictures: a corruption that only adds noise or blurs must change them more with its severity."""
    torch.manual_seed(0)
    return gaussian(torch.rand(count, channels, height, width), 1.0)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_keeps_its_contract(name):
    for x in (images(), images(channels=1, height=9, width=13), images(2).double()):
        mild, strong = corrupt(x, name, 1), corrupt(x, name, 5)
        for out in (mild, strong):
            assert (out.shape, out.dtype) == (x.shape, x.dtype)
            assert ((out >= 0) & (out <= 1)).all()
        assert not torch.equal(mild, x)
        part, single = corrupt(x[1:], name, 5, first=1), corrupt(x, name, 5, chunk=1)
        assert torch.allclose(part, strong[1:], atol=1e-5)  # the batch does not matter
        assert torch.allclose(single, strong, atol=1e-5)
    # The first severities of the elastic transform warp more widely than the last; strong glass blurs its own grain.
    if name not in ("elastic-transform", "glass-blur"):
        x = images(2, 3, 60, 48)
        errors = [(corrupt(x, name, severity) - x).square().mean() for severity in (1, 5)]
        assert errors[0] < errors[1]
    random = not torch.equal(corrupt(x, name, 3), corrupt(x, name, 3, seed=1))
    still = {"defocus-blur", "zoom-blur", "brightness", "contrast", "pixelate", "jpeg-compression"}
    assert random == (name not in still)


def test_noise_has_the_moments_of_its_definition():
    x = torch.full((4, 3, 60, 60), 0.5)
    assert (corrupt(x, "gaussian-noise", 1) - x).std() == pytest.approx(0.08, rel=0.03)
    shot = corrupt(x, "shot-noise", 2)
    assert shot.mean() == pytest.approx(0.5, abs=0.005)
    assert shot.var() == pytest.approx(0.5 / 25, rel=0.05)
    impulse = corrupt(x, "impulse-noise", 5)
    assert (impulse == 0).float().mean() == pytest.approx(0.135, abs=0.01)
    assert (impulse == 1).float().mean() == pytest.approx(0.135, abs=0.01)


def test_poisson_is_the_quantile_function():
    rate, u = torch.rand(500).double() * 60, torch.rand(500).double()
    rate[0] = 0
    assert np.array_equal(poisson(rate, u).numpy(), stats.poisson.ppf(u.numpy(), rate.numpy()).clip(0))


def test_filters_are_those_of_scipy():
    x = torch.rand(2, 3, 11, 14, dtype=torch.float64)
    assert np.allclose(
        gaussian(x, 1.3)[1, 2], ndimage.gaussian_filter(x[1, 2].numpy(), 1.3, mode="nearest", truncate=4.7)
    )
    kernels = torch.rand(2, 5, 5, dtype=torch.float64)
    expected = ndimage.correlate(x[1, 0].numpy(), kernels[1].numpy(), mode="nearest")
    assert np.allclose(filtered(x, kernels)[1, 0], expected)
    assert torch.allclose(zoomed(x, 1.0), x)
    odd = torch.rand(1, 1, 5, 7)
    assert zoomed(odd, 3.0)[0, 0, 2, 3] == pytest.approx(float(odd[0, 0, 2, 3]))


@pytest.mark.parametrize("sigma", [0.5, 1.3, 9.0, 30.0])
def test_a_blur_wider_than_the_image_sees_its_mirror_images(sigma):
    x = torch.rand(2, 2, 11, 14, dtype=torch.float64)
    expected = ndimage.gaussian_filter(x[1, 0].numpy(), sigma, mode="reflect", truncate=3)
    assert np.allclose(mirrored_gaussian(x, sigma)[1, 0], expected)


def drawn_for(name, count, seed=0):
    """The random numbers of images 0, 1, ... for a corruption."""
    return Noise(seed, torch.arange(count)).fork(list(CORRUPTIONS).index(name))


ELASTIC = ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))


@pytest.mark.parametrize("severity", range(1, 6))
def test_elastic_transform_is_an_affine_map_and_a_smooth_field(severity):
    """One image, by the definition: three corners that move, and a field that scipy smooths and looks up."""
    x = gaussian(torch.rand(2, 1, 60, 66, dtype=torch.float64), 1.0)
    strength, smooth, jitter = ELASTIC[severity - 1]
    noise = drawn_for("elastic-transform", 2)
    moved = (2 * noise.fork(0).uniform((3, 2), torch.float64)[1].numpy() - 1) * jitter * 60
    middle = np.array([29.5, 32.5])
    corners = middle + 20 * np.array([[-1, -1], [-1, 1], [1, 1]])
    affine = np.linalg.solve(np.column_stack([corners, np.ones(3)]), corners + moved)
    grid = np.stack(np.meshgrid(np.arange(60.0), np.arange(66.0), indexing="ij"), -1)
    places = (np.concatenate([grid, np.ones((60, 66, 1))], -1) @ affine).transpose(2, 0, 1)
    for axis in range(2):
        drawn = 2 * noise.fork(1).uniform((2, 60, 66), torch.float64)[1, axis].numpy() - 1
        field = ndimage.gaussian_filter(drawn, max(smooth * 60, 0.5), mode="reflect", truncate=3)
        places[axis] += strength * 60 * (60 / 224) * field
    expected = ndimage.map_coordinates(x[1, 0].numpy(), places, order=1, mode="reflect")
    assert np.allclose(corrupt(x, "elastic-transform", severity)[1, 0], expected)


def test_the_field_of_the_elastic_transform_scales_with_the_image():
    """Rows and columns as an image: how far pixels go on average, as a share of the side, is no matter of the size."""
    shares = []
    for side in (32, 128):
        ramp = ((torch.arange(side) + 0.5) / side).expand(1, 1, side, side).repeat(40, 1, 1, 1)
        inner = slice(side // 4, 3 * side // 4)
        shares.append(float((corrupt(ramp, "elastic-transform", 2) - ramp)[..., inner, inner].square().mean().sqrt()))
    assert shares[0] == pytest.approx(shares[1], rel=0.15)


STEPS = ((11, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03))


@pytest.mark.parametrize("severity", range(1, 6))
def test_zoom_blur_is_the_mean_of_all_enlargements(severity):
    x = images(1)
    count, step = STEPS[severity - 1]
    enlarged = [zoomed(x, 1 + i * step) for i in range(count)]
    assert torch.allclose(corrupt(x, "zoom-blur", severity), (x + sum(enlarged)) / (count + 1), atol=1e-6)


def test_kernels_of_disc_and_line():
    assert disc(0.0).sum() == pytest.approx(1)
    ideal = disc(40.0)[0]
    assert float(ideal[41, 41]) == pytest.approx(1 / (np.pi * 40.0**2), rel=0.05)
    right, down = line_kernels(3.0, 2.0, torch.tensor([0.0, np.pi / 2]))
    assert torch.allclose(right.sum(1), torch.tensor([0, 0, 0, 1.0, 0, 0, 0]), atol=1e-6)
    assert torch.allclose(right.T, down, atol=1e-6)
    assert right[3, :3].sum() == pytest.approx(0, abs=1e-6)


def test_jpeg_is_the_rounded_cosine_transform():
    assert torch.allclose(
        dct_matrix(torch.zeros(1).double()), torch.from_numpy(fft.dct(np.eye(8), norm="ortho", axis=0))
    )
    x = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    table = np.array([16, 11, 10, 16, 24, 40, 51, 61])  # first row at quality 50
    found = fft.dctn(255 * jpeg(x, 50)[0, 0].numpy() - 128, norm="ortho")[0]
    assert np.allclose(found / table, np.round(found / table), atol=0.3)  # pixels are rounded afterwards
    colours = images(1, 3, 15, 18)
    errors = [float((jpeg(colours, q) - colours).abs().mean()) for q in (100, 50, 10)]
    assert errors == sorted(errors)
    assert errors[0] < 0.005
    grey = torch.full((1, 3, 9, 9), 128 / 255)
    assert torch.allclose(jpeg(grey, 10), grey, atol=1e-6)


def test_brightness_keeps_hue_and_contrast_keeps_the_mean():
    x = torch.rand(2, 3, 6, 6) * 0.4 + 0.1
    bright = corrupt(x, "brightness", 2)
    assert torch.allclose(bright.amax(1), x.amax(1) + 0.2)
    assert torch.allclose(bright / bright.amax(1, keepdim=True), x / x.amax(1, keepdim=True), atol=1e-6)
    assert torch.allclose(corrupt(torch.zeros(1, 3, 6, 6), "brightness", 1), torch.tensor(0.1))
    flat = corrupt(x, "contrast", 5)
    assert torch.allclose(flat.mean((2, 3)), x.mean((2, 3)), atol=1e-6)
    assert torch.allclose(flat.std((2, 3)), 0.05 * x.std((2, 3)), atol=1e-6)


def test_pixelate_shows_means_and_fog_keeps_the_range():
    x = torch.rand(1, 1, 8, 8)
    boxes = corrupt(x, "pixelate", 2)
    assert torch.allclose(boxes[0, 0, 2:4, 4:6], x[0, 0, 2:4, 4:6].mean())
    found = clouds(torch.zeros(3, 1, 30, 17), 2.0, Noise(0, torch.arange(3)))
    assert torch.allclose(found.amin((1, 2, 3)), torch.zeros(3))
    assert torch.allclose(found.amax((1, 2, 3)), torch.ones(3))
    assert corrupt(x, "fog", 3).max() <= x.max() + 1e-6


@pytest.mark.parametrize(
    ("x", "name", "severity", "message"),
    [
        (torch.zeros(1, 3, 8, 8), "fogg", 1, "unknown corruption 'fogg'.*fog"),
        (torch.zeros(1, 3, 8, 8), "fog", 6, "from 1 to 5, got 6"),
        (torch.zeros(1, 3, 8, 8), "fog", 0, "from 1 to 5, got 0"),
        (torch.zeros(1, 2, 8, 8), "fog", 1, "1 or 3 channels"),
        (torch.zeros(1, 7), "fog", 1, "images of shape"),
        (torch.full((1, 1, 8, 8), 2.0), "fog", 1, r"pixels in \[0, 1\]"),
        (torch.full((1, 1, 8, 8), torch.nan), "fog", 1, r"pixels in \[0, 1\]"),
    ],
)
def test_bad_input_is_refused(x, name, severity, message):
    with pytest.raises(InputError, match=message):
        corrupt(x, name, severity)
