"""Every corruption at every severity against its definition, written once more for one image with NumPy and SciPy."""

import colorsys
import io
import math

import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from holdfast.data.corruptions import CORRUPTIONS, corrupt
from holdfast.data.corruptions.digital import jpeg
from holdfast.data.corruptions.filters import clouds, filtered, gaussian, line_kernels, zoomed
from holdfast.random import Noise

LEVELS = range(5)
SIDE = 40  # lengths are given at 224 pixels


def picture(channels=3):
    torch.manual_seed(0)
    return gaussian(torch.rand(2, channels, SIDE, SIDE + 3, dtype=torch.float64), 1.0)


def draws_of(name):
    return Noise(0, torch.arange(2)).fork(list(CORRUPTIONS).index(name))


def check(name, level, expected, channel=0, places=...):
    """The second of two images, which draws its own numbers."""
    found = corrupt(picture(), name, level + 1)[1, channel].numpy()
    assert np.allclose(found[places], np.clip(expected, 0, 1)[places], atol=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_noises(level):
    x = picture()[1, 0].numpy()
    shape = (3, SIDE, SIDE + 3)
    normal = draws_of("gaussian-noise").normal(shape, torch.float64)[1, 0].numpy()
    check("gaussian-noise", level, x + (0.08, 0.12, 0.18, 0.26, 0.38)[level] * normal)
    photons = (60, 25, 12, 5, 3)[level]
    u = draws_of("shot-noise").uniform(shape, torch.float64)[1, 0].numpy()
    check("shot-noise", level, stats.poisson.ppf(u, photons * x) / photons)
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[level]
    u = draws_of("impulse-noise").uniform(shape, torch.float64)[1, 0].numpy()
    check("impulse-noise", level, np.where(u < share / 2, 0, np.where(u < share, 1, x)))


@pytest.mark.parametrize("level", LEVELS)
def test_defocus_is_the_mean_over_a_soft_disc(level):
    radius = (3, 4, 6, 8, 10)[level] * SIDE / 224
    half = math.ceil(radius + 1)
    rows, columns = np.mgrid[-half : half + 1, -half : half + 1]
    disc = np.clip(radius + 1 - np.hypot(rows, columns), 0, 1)
    check("defocus-blur", level, ndimage.correlate(picture()[1, 0].numpy(), disc / disc.sum(), mode="nearest"))


@pytest.mark.parametrize("level", LEVELS)
def test_glass_copies_neighbours_between_two_blurs(level):
    sigma, reach, times = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[level]
    sigma, reach = sigma * 0.5, max(1, round(reach * SIDE / 224))
    x, noise = gaussian(picture(), sigma)[1, 0].numpy(), draws_of("glass-blur")
    for turn in range(times):
        shift = noise.fork(turn).integers(2 * reach + 1, (2, *x.shape))[1].numpy() - reach
        assert (shift.min(), shift.max()) == (-reach, reach)
        rows, columns = np.indices(x.shape)
        x = x[np.clip(rows + shift[0], 0, len(x) - 1), np.clip(columns + shift[1], 0, x.shape[1] - 1)]
    check("glass-blur", level, gaussian(torch.from_numpy(x)[None, None], sigma)[0, 0].numpy())


@pytest.mark.parametrize("level", LEVELS)
def test_motion_is_the_mean_along_a_line(level):
    length, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[level]
    angles = np.radians(90 * draws_of("motion-blur").uniform((), torch.float64).numpy() - 45)
    kernels = line_kernels(length * SIDE / 224, sigma * SIDE / 224, torch.from_numpy(angles))
    expected = ndimage.correlate(picture()[1, 0].numpy(), kernels[1].numpy(), mode="nearest")
    check("motion-blur", level, expected)


def test_weights_along_a_line_fall_off_as_a_gaussian():
    (kernel,) = line_kernels(6.0, 3.0, torch.zeros(1, dtype=torch.float64))
    along = kernel.sum(0)[7:12]
    assert torch.allclose(along[1:] / along[:-1], torch.exp(-(2 * torch.arange(1.0, 5) + 1) / 18).double(), atol=0.01)


@pytest.mark.parametrize("level", LEVELS)
def test_snow_is_noise_that_falls_on_a_whiter_image(level):
    mean, deviation, zoom, least, length, sigma, kept = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )[level]
    x, noise = picture(), draws_of("snow")
    flakes = zoomed(mean + deviation * noise.fork(0).normal((1, *x.shape[2:]), x.dtype), zoom)
    flakes = torch.where(flakes < least, 0, flakes).clamp(0, 1)
    angles = torch.deg2rad(90 * noise.fork(1).uniform((), x.dtype) - 135)
    flakes = filtered(flakes, line_kernels(length * SIDE / 224, sigma * SIDE / 224, angles))[1, 0].numpy()
    red, green, blue = x[1].numpy()
    white = np.maximum(red, 1.5 * (0.299 * red + 0.587 * green + 0.114 * blue) + 0.5)
    check("snow", level, kept * red + (1 - kept) * white + flakes + np.rot90(flakes, 2))


@pytest.mark.parametrize("level", LEVELS)
def test_frost_and_fog_are_clouds(level):
    x = picture()
    kept, strength = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[level]
    cloud = clouds(x, 1.5, draws_of("frost"))[1, 0].numpy()
    check("frost", level, kept * x[1, 0].numpy() + strength * (1 - np.abs(2 * cloud - 1)) ** 2)
    strength, decay = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))[level]
    cloud, most = clouds(x, decay, draws_of("fog"))[1, 0].numpy(), float(x[1].max())
    check("fog", level, (x[1, 0].numpy() + strength * cloud) * most / (most + strength))


def test_coarse_clouds_are_stronger_the_faster_octaves_decay():
    """Differences of neighbours, as a share of the range: smooth clouds have few small octaves."""
    noise = Noise(0, torch.arange(8))
    steps = [float(clouds(torch.zeros(8, 1, 64, 64), decay, noise).diff(dim=3).abs().mean()) for decay in (1.2, 2, 4)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("level", LEVELS)
def test_light_contrast_and_coarse_pixels(level):
    x = picture()[1].numpy()
    value = (0.1, 0.2, 0.3, 0.4, 0.5)[level]
    hsv = [colorsys.rgb_to_hsv(*pixel) for pixel in x.reshape(3, -1).T]
    brighter = np.array([colorsys.hsv_to_rgb(h, s, min(v + value, 1)) for h, s, v in hsv]).T.reshape(x.shape)
    check("brightness", level, brighter[2], channel=2)
    check("contrast", level, x[0].mean() + (0.4, 0.3, 0.2, 0.1, 0.05)[level] * (x[0] - x[0].mean()))
    share = (0.6, 0.5, 0.4, 0.3, 0.25)[level]
    found = corrupt(picture(), "pixelate", level + 1)[1, 0]
    assert len(found.unique()) == int(SIDE * share) * int((SIDE + 3) * share)
    first = found[0, 0] == found  # the first box shows the mean of what it covers, or of a pixel more
    rows = math.ceil(SIDE / int(SIDE * share)), math.ceil((SIDE + 3) / int((SIDE + 3) * share))
    assert float(found[0, 0]) == pytest.approx(x[0][: rows[0], : rows[1]].mean())
    assert abs(int(first.sum()) - rows[0] * rows[1]) <= rows[0] + rows[1]


@pytest.mark.parametrize("level", LEVELS)
def test_jpeg_is_that_of_pillow_to_a_rounding(level):
    """Colours at full resolution; Pillow rounds inside its transform, too."""
    image = pytest.importorskip("PIL.Image")
    quality = (25, 18, 15, 10, 7)[level]
    x = (picture() * 255).round() / 255
    assert torch.equal(corrupt(x, "jpeg-compression", level + 1), jpeg(x, quality))
    file = io.BytesIO()
    pixels = (x[1] * 255).permute(1, 2, 0).byte().numpy()
    image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling=0)
    expected = np.asarray(image.open(file).convert("RGB")).astype(float)
    difference = 255 * jpeg(x, quality)[1].permute(1, 2, 0).numpy() - expected
    assert np.abs(difference).mean() < 1.5
