"""Smoothing in l1 and over pixels: exact probabilities by area and by enumeration, and radii that no change beats."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.certificates.smoothing.ablation import TwoChannels, ablate, choose, pixels, random_pixels
from holdfast.certificates.smoothing.smoothing_l0 import ablation_noise, fall
from holdfast.certificates.smoothing.smoothing_l1 import l1_noise, l1_probability, l1_radius
from holdfast.random import Noise


class Above(nn.Module):
    """Class 1 where the first value is above a threshold, class 0 elsewhere."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def forward(self, x):
        z = x.flatten(1)[:, 0] - self.threshold
        return torch.stack([torch.zeros_like(z), z], 1)


def above(offset, noise, scale):
    """P[offset + u > 0] in closed form."""
    if noise == "uniform":
        return min(max((offset + scale) / (2 * scale), 0.0), 1.0)
    return 1 - math.exp(-offset / scale) / 2 if offset >= 0 else math.exp(offset / scale) / 2


@pytest.mark.parametrize("noise", ["uniform", "laplace"])
def test_the_l1_radius_of_a_half_space_is_its_distance(noise):
    """Along one axis the bound is tight: what the exact probability proves ends where the class changes."""
    for offset in (0.01, 0.1, 0.29):
        p = torch.tensor([above(offset, noise, 0.3)], dtype=torch.float64)
        radius = float(l1_radius(p, noise, 0.3))
        assert radius == pytest.approx(offset, rel=1e-9)
        assert radius <= offset
        needed = float(l1_probability(torch.tensor([offset]), noise, 0.3))
        assert needed == pytest.approx(float(p), rel=1e-6)


def box_share(x, boxes, scale):
    """Exact P[x + uniform noise lies in one of the disjoint boxes], by area; x (2,), boxes of (low, high) corners."""
    total = 0.0
    for low, high in boxes:
        sides = [
            max(0.0, min(h, float(v) + scale) - max(lo, float(v) - scale))
            for lo, h, v in zip(low, high, x, strict=True)
        ]
        total += math.prod(sides) / (2 * scale) ** 2
    return total


@given(st.integers(0, 1000), st.floats(0.2, 1.0))
@settings(max_examples=15, deadline=None)
def test_no_l1_change_beats_the_radius_of_uniform_noise(seed, scale):
    """Classes of random cells in the plane, the probability by area: all changes of the radius keep one half."""
    torch.manual_seed(seed)
    cells = [(i / 2 - 1, j / 2 - 1) for i in range(6) for j in range(6)]
    chosen = [c for c, keep in zip(cells, torch.rand(len(cells)) < 0.8, strict=True) if keep]
    boxes = [(c, (c[0] + 1 / 2, c[1] + 1 / 2)) for c in chosen]
    x = torch.rand(2, dtype=torch.float64)
    p = box_share(x, boxes, scale)
    radius = float(l1_radius(torch.tensor([p], dtype=torch.float64), "uniform", scale))
    for angle in torch.linspace(0, 2 * math.pi, 9):
        direction = torch.stack([angle.cos(), angle.sin()]).double()
        moved = x + radius * direction / direction.abs().sum()
        assert radius == 0 or box_share(moved, boxes, scale) >= 0.5 - 1e-9


def test_laplace_noise_changes_no_probability_faster_than_the_bound():
    """Intervals on a line, with the distribution function of Laplace."""

    def share(x, low, high):
        return above(x - low, "laplace", 0.4) - above(x - high, "laplace", 0.4)

    for low, high in ((0.0, 0.7), (-0.3, 2.0), (0.2, 9.0)):
        p = share(0.5, low, high)
        radius = float(l1_radius(torch.tensor([p], dtype=torch.float64), "laplace", 0.4))
        for step in (-radius, -radius / 2, radius / 2, radius):
            assert radius == 0 or share(0.5 + step, low, high) >= 0.5 - 1e-9


@pytest.mark.parametrize("noise", ["uniform", "laplace"])
def test_l1_noise_has_its_distribution(noise):
    copies = l1_noise(noise, 0.3)(torch.full((2, 3), 0.5), 4000, torch.Generator().manual_seed(0))
    assert copies.shape == (4000, 2, 3)
    for offset in (-0.2, 0.0, 0.1):
        share = float((copies - 0.5 > -offset).double().mean())
        assert share == pytest.approx(above(offset, noise, 0.3), abs=0.02)


@pytest.mark.parametrize("noise", ["uniform", "laplace"])
def test_l1_certificates_are_about_the_smoothed_classifier(noise):
    x = torch.tensor([[0.5, 0.3], [0.75, 0.1], [0.95, 0.5]])
    y = torch.ones(3, dtype=torch.int64)
    result = hf.certify(Above(0.6).eval(), x, y, hf.L1(0.1), "smoothing-l1", noise=noise, scale=0.4, n=3000)
    assert result.certified.tolist() == [False, True, True]
    assert bool((result.certified == (result.margin > 0)).all())
    assert result.by == ("", "smoothing-l1", "smoothing-l1")
    assert result.alpha == 0.001
    fixed = hf.certify(
        *(Above(0.6).eval(), x, y, hf.L1(0.1), "smoothing-l1"), noise=noise, scale=0.4, n=3000, adaptive=False, seed=3
    )
    distance = x[:, 0] - 0.6
    assert bool((fixed.radius <= distance.clamp(min=0)).all())
    assert bool((fixed.radius[1:] > 0.6 * distance[1:]).all())
    assert bool((result.radius[result.certified] > 0.1).all())


def test_the_answer_follows_from_the_seed_and_not_from_the_batch():
    model, x = Above(0.55).eval(), torch.tensor([0.6, 0.65, 0.7, 0.4, 0.2])[:, None].repeat(1, 3)
    y = (x[:, 0] > 0.55).long()
    for method, threat, options in (
        ("smoothing-l1", hf.L1(0.01), {"scale": 0.3}),
        ("smoothing-l0", hf.Sparse(0), {"size": 2}),
    ):
        first, again, small, other = (
            hf.certify(model, x, y, threat, method, n=500, batch=batch, seed=seed, **options).margin
            for batch, seed in ((1000, 0), (1000, 0), (100, 0), (1000, 1))
        )
        assert torch.equal(first, again)
        assert torch.equal(first, small)
        assert not torch.equal(first, other)


class Stop(Exception):
    """To leave a run."""


@pytest.mark.parametrize(
    ("method", "threat", "options"),
    [("smoothing-l1", hf.L1(0.05), {"scale": 0.3}), ("smoothing-l0", hf.Sparse(1), {"size": 1})],
)
def test_a_run_that_was_stopped_goes_on_where_it_was(method, threat, options):
    model, x = Above(0.45).eval(), torch.tensor([0.5, 0.55, 0.7])[:, None].repeat(1, 6)
    y, seen = torch.ones(3, dtype=torch.int64), []

    def watch(counts, left):
        seen.append(counts)
        if len(seen) == 5:
            raise Stop

    options = {**options, "n": 1000, "batch": 200, "adaptive": False}
    whole = hf.certify(model, x, y, threat, method, **options)
    with pytest.raises(Stop):
        hf.certify(model, x, y, threat, method, watch=watch, **options)
    resumed = hf.certify(model, x, y, threat, method, counts=seen[-1], **options)
    assert torch.equal(resumed.margin, whole.margin)
    assert 0 < int(seen[-1].drawn.sum()) < 3000
    with pytest.raises(hf.InputError, match="another run"):
        hf.certify(model, x, y, threat, method, counts=seen[-1], **{**options, "seed": 1})


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_the_chance_to_see_a_changed_pixel_is_exact(count):
    for size in range(1, count + 1):
        exact = [1 - math.comb(count - rho, size) / math.comb(count, size) for rho in range(count + 1)]
        found = fall(count, size)
        assert found.tolist() == pytest.approx(exact, abs=1e-9)
        assert all(f >= e for f, e in zip(found.tolist(), exact, strict=True))


class Table(nn.Module):
    """A class for each ablated binary input, drawn at random: the worst kind of network."""

    def __init__(self, cells, classes, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        favoured = torch.rand(3**cells, generator=generator) < 0.85
        other = torch.randint(classes, (3**cells,), generator=generator)
        self.register_buffer("answers", torch.where(favoured, 0, other))
        self.register_buffer("place", 3 ** torch.arange(cells))
        self.classes = classes

    def forward(self, x):
        digits = torch.where(x == 0.5, 2, (x > 0.5).long()).flatten(1)
        return nn.functional.one_hot(self.answers[digits @ self.place], self.classes).to(x)


def subset_masks(count, size):
    """All masks of `size` of `count` pixels."""
    masks = torch.zeros(math.comb(count, size), count, dtype=torch.bool)
    for row, kept in enumerate(itertools.combinations(range(count), size)):
        masks[row, list(kept)] = True
    return masks


@pytest.mark.parametrize(("size", "seed"), [(1, 0), (2, 1), (3, 2)])
def test_no_change_of_pixels_beats_randomised_ablation(size, seed):
    """Seven binary pixels, all subsets by enumeration: no change takes the exact vote from what it is proved for."""
    cells = 7
    model, masks = Table(cells, 3, seed).eval(), subset_masks(cells, size)
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=cells)))

    def shares(x):
        return model(ablate(x[:, None], masks, 0.5).flatten(0, 1)).unflatten(0, (len(x), -1)).mean(1)

    p = shares(every)[:, 0].double()
    y = torch.zeros(len(every), dtype=torch.int64)
    distance = torch.cdist(every, every, p=0).round()
    drops = fall(cells, size)
    proved_something = False
    for rho in range(3):
        proved = p - drops[rho] > 0.5
        worst = torch.where(distance <= rho, p[None], 1.0).amin(1)
        assert bool((worst[proved] > 0.5).all())
        proved_something |= bool(proved.any()) and rho > 0
        if drops[rho] > 0.45:  # nothing to prove
            continue
        result = hf.certify(model, every, y, hf.Sparse(rho), "smoothing-l0", size=size, n=4000, alpha=1e-4)
        assert not bool((result.certified & ~proved).any())
        assert int(result.certified.sum()) >= 0.5 * int(proved.sum())
        assert bool((result.radius[result.certified] >= rho).all())
    assert proved_something


def test_the_pixels_that_are_kept_are_uniform_and_count_once():
    x = torch.rand(2, 2, 3) * 0.4
    copies = ablation_noise(2, 0.5)(x, 3000, torch.Generator().manual_seed(0))
    kept = (copies != 0.5).all(1)
    assert torch.equal(kept, (copies != 0.5).any(1))
    assert bool((kept.flatten(1).sum(1) == 2).all())
    sets = kept.flatten(1).long() @ (2 ** torch.arange(6))
    shares = torch.stack([(sets == s).double().mean() for s in sets.unique()])
    assert len(shares) == 15
    assert float((shares - 1 / 15).abs().max()) < 0.02
    assert bool(((copies == x) | (copies == 0.5)).all())


def test_masks_of_images_and_of_vectors():
    images, vectors = torch.rand(4, 3, 5, 2), torch.rand(4, 7)
    assert pixels(images) == 10
    assert pixels(vectors) == 7
    noise = Noise.for_batch(0, 4)
    assert random_pixels(images, 4, noise).shape == (4, 1, 5, 2)
    assert random_pixels(vectors, 4, noise).sum(1).tolist() == [4] * 4
    assert choose(torch.tensor([[3, 1, 2]]), 2, (3,)).tolist() == [[True, False, True]]
    assert random_pixels(images[:0], 4, noise[:0]).shape == (0, 1, 5, 2)
    with pytest.raises(hf.InputError, match="between 1 and the 7"):
        random_pixels(vectors, 8, noise)


def test_two_channels_tell_an_ablated_pixel_from_all_others():
    layer = TwoChannels()
    x = torch.rand(2, 3, 4, 5)
    keep = torch.rand(2, 1, 4, 5) < 0.5
    encoded = layer(ablate(x, keep, -1.0))
    assert encoded.shape == (2, 6, 4, 5)
    assert torch.equal(encoded[:, :3], torch.where(keep, x, 0.0))
    assert torch.equal(encoded[:, 3:], torch.where(keep, 1 - x, 0.0))
    with pytest.raises(hf.InputError, match="outside of"):
        TwoChannels(0.5)


@pytest.mark.parametrize(
    ("method", "threat", "options", "message"),
    [
        ("smoothing-l1", hf.L1(0.1), {}, "needs scale"),
        ("smoothing-l1", hf.L1(0.1), {"scale": -1.0}, "'scale'.*expected a number > 0, got -1.0"),
        ("smoothing-l1", hf.L1(0.1), {"scale": 0.2, "noise": "cauchy"}, "'noise'.*unknown value 'cauchy'"),
        ("smoothing-l1", hf.L1(0.1), {"scale": 0.2, "radii": (-1.0,)}, "'radii'.*expected an? .* >= 0, got -"),
        ("smoothing-l1", hf.L1(0.1), {"scale": 0.2, "alpha": 0.0}, "alpha"),
        ("smoothing-l1", hf.L1(0.5), {"scale": 0.2}, "out of reach"),
        ("smoothing-l1", hf.L1(0.199), {"scale": 0.2, "n": 100}, "the smallest n that can is"),
        ("smoothing-l0", hf.Sparse(1), {}, "needs size"),
        ("smoothing-l0", hf.Sparse(1), {"size": 3}, "1 to 2, got 3"),
        ("smoothing-l0", hf.Sparse(1), {"size": 1, "radii": (-1,)}, "'radii'.*expected an? .* >= 0, got -"),
        ("smoothing-l0", hf.Sparse(2), {"size": 1}, "out of reach"),
    ],
)
def test_what_makes_no_sense_is_refused(method, threat, options, message):
    x = torch.rand(2, 2)
    with pytest.raises(hf.InputError, match=message):
        hf.certify(Above(0.5).eval(), x, torch.zeros(2, dtype=torch.int64), threat, method, **options)


class Sure(nn.Module):
    """Always class 0."""

    def forward(self, x):
        return torch.stack([torch.ones(len(x)), torch.zeros(len(x))], 1)


@pytest.mark.parametrize(("size", "pixels"), [(2, 2), (1, 4), (5, 0)])
def test_the_radius_of_ablation_is_the_last_number_of_pixels_that_the_probability_covers(size, pixels):
    """9 pixels, `size` of them seen: rho changed ones are seen with probability 1 - C(9 - rho, size) / C(9, size).

    Seen 2: 0.22, 0.42 and 0.58 for rho = 1, 2, 3, so that a probability near 1 proves 2. Seen 1: rho / 9, so that it
    proves 4. Seen 5: 0.56 for one pixel, which is more than a half.
    """
    seen = [1 - math.comb(9 - rho, size) / math.comb(9, size) for rho in range(9)]
    assert pixels == max(rho for rho in range(9) if 0.5 + seen[rho] < 0.993)
    x, y = torch.rand(2, 1, 3, 3), torch.tensor([0, 0])
    found = hf.certify(Sure().eval(), x, y, hf.Sparse(pixels), "smoothing-l0", size=size, n=1000, adaptive=False)
    assert found.radius.tolist() == [pixels] * 2
    assert bool(found.certified.all())
