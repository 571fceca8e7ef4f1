"""The geometry of the toys, and what guess and check finds on them."""

import pytest
import torch

from holdfast.analyze.plots.boundaries import boundaries_svg
from holdfast.analyze.volume.family import make_family
from holdfast.analyze.volume.slab import kinds, linear_probes, robust_probes, slab_points
from holdfast.analyze.volume.toys import slab_study, wedge_study
from holdfast.analyze.volume.wedge import one_hidden_layer, wedge_points, wedge_task
from holdfast.errors import InputError, OutOfTime
from holdfast.utils.clock import now, timed_by, until


def test_the_wedge_has_two_roofs_a_margin_apart():
    points = wedge_points(1000, seed=1)
    height = points.x[:, 1] + points.x[:, 0].abs()
    assert torch.allclose(height, 0.25 * (points.y == 0), atol=1e-6)
    assert float(points.x[:, 0].min()) < -0.95
    assert float(points.x[:, 0].max()) > 0.95
    train, test = wedge_task(seed=4)
    assert (len(train), len(test)) == (11, 5)
    assert float(torch.cdist(train.x, test.x).min()) > 0
    assert [(one_hidden_layer(u)[0].bias, one_hidden_layer(u)[2].bias is None) for u in (2,)] == [(None, False)]


def test_no_network_is_wrong_between_points_of_class_one_on_a_ray():
    """Without hidden biases logits are affine along a ray from the origin: two ends that are right leave no choice."""
    family = make_family(one_hidden_layer(20).double())
    along = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    for side in (-1.0, 1.0):
        x = torch.stack([side * along, -along], 1)  # one half of the lower roof of the wedge
        chosen = family.logits(family.draw(2000, seed=0, like=x), x).argmax(2)
        ends = (chosen[:, 0] == 1) & (chosen[:, -1] == 1)
        assert 100 < int(ends.sum()) < 1900
        assert bool((chosen[ends] == 1).all())
    train, test = wedge_task(seed=1)  # a draw of which poisoned training gets no network below 40 %
    between = 0
    for x, y in zip(test.x, test.y, strict=True):
        others = train.x[(train.y == 1) & (train.x[:, 0].sign() == x[0].sign()), 0].abs()
        between += int(y) == 1 and len(others) > 1 and bool(others.min() < x[0].abs() < others.max())
    assert between == 2


def zigzag(x):
    """Class by the zig-zag line, written from the picture: gaps in the middle of which it crosses x = 0."""
    crossings = torch.tensor([-0.55, 0.0, 0.55])
    gap = (x[:, 1:] - crossings).abs().argmin(1)
    line = torch.tensor([1.0, -1.0, 1.0])[gap] * (x[:, 1] - crossings[gap])
    return (x[:, 0] < line).long()


def test_both_boundaries_fit_the_slabs_and_each_only_its_probes():
    points = slab_points(2000, seed=2)
    assert torch.equal((points.x[:, 0] < 0).long(), points.y)
    assert float(points.x[:, 0].abs().min()) >= 0.1
    assert torch.equal(zigzag(points.x), points.y)
    edges = [points.x[points.y == 1, 1], points.x[points.y == 0, 1]]
    for low, high, label in ((0.65, 1.0, 1), (0.1, 0.45, 0), (-0.45, -0.1, 1), (-1.0, -0.65, 0)):
        inside = (edges[1 - label] >= low - 1e-6) & (edges[1 - label] <= high + 1e-6)
        assert int(inside.sum()) == 500
    linear, robust = linear_probes(), robust_probes()
    assert torch.equal((linear.x[:, 0] < 0).long(), linear.y)
    assert not torch.equal(zigzag(linear.x), linear.y)
    assert torch.equal(zigzag(robust.x), robust.y)
    assert not torch.equal((robust.x[:, 0] < 0).long(), robust.y)
    right, left = robust.x.chunk(2)
    assert torch.allclose(right - left, torch.tensor([2 * 0.1 * 2**0.5, 0.0]))  # 0.1 from the line to either side


def test_kinds_of_a_linear_network():
    family = make_family(one_hidden_layer(2))
    # relu(x), relu(-x); logits: class 0 to the right
    straight = torch.tensor([[1.0, 0, -1, 0, 1, -1, -1, 1, 0, 0], [-1.0, 0, 1, 0, 1, -1, -1, 1, 0, 0]])
    found = kinds(family, straight)
    assert found.linear.tolist() == [True, False]
    assert found.robust.tolist() == [False, False]


def test_the_slabs_are_fitted_mostly_by_other_boundaries_and_never_robustly():
    found = slab_study(guesses=30_000)
    assert found.fits.guesses == found.linear.guesses >= 30_000
    assert 0 < found.linear.hits < found.fits.hits == len(found.weights)
    assert found.linear.low < 2e-4 < found.linear.high
    assert found.robust.hits == 0


def test_the_wedge_study_guesses_and_poisons():
    (found,) = wedge_study((10,), guesses=30_000, runs=2, epochs=500, seed=0)
    train, _ = wedge_task(seed=0)
    fits = found.family.logits(found.guessed, train.x).argmax(2) == train.y
    assert found.volume.hits == len(found.guessed) > 0
    assert bool(fits.all())
    assert 0.6 < float(found.accuracy.mean()) <= 1
    groups = {"guessed": (found.family, found.guessed), "poisoned": (found.family, found.poisoned[:0])}
    picture = boundaries_svg(groups, train.x, train.y, columns=2, cells=10)
    assert picture.text.count("<circle") == 2 * 11
    assert "poisoned: none" in picture.text


def test_toys_keep_a_deadline():
    """By a clock that counts how often it is asked: the time is over in the middle of the first width."""
    ticks = iter(range(10**9))
    with timed_by(lambda: float(next(ticks))), until(now() + 20):
        found = wedge_study((2, 4, 10), guesses=1_000_000, runs=2, epochs=500)
    assert len(found) == 1
    assert 0 < found[0].volume.guesses < 1_000_000
    for toy in (wedge_study, slab_study):
        with until(now() - 1), pytest.raises(OutOfTime, match="the time is over"):
            toy()


def test_the_picture_colours_the_class_of_each_cell():
    family = make_family(one_hidden_layer(2))
    right = torch.tensor([[1.0, 0, -1, 0, 1, -1, -1, 1, 0, 0]])
    x, y = torch.tensor([[0.5, 0.5], [-0.5, 0.5]]), torch.tensor([0, 1])
    text = boundaries_svg({"a": (family, right)}, x, y, cells=4).text
    rects = [line for line in text.splitlines() if "#c8dff0" in line]
    assert len(rects) == 2  # the two columns to the left
    assert 'x="0.0"' in rects[0]
    assert 'height="110.0"' in rects[0]
    with pytest.raises(InputError, match="expected points"):
        boundaries_svg({"a": (family, right)}, x[:, :1], y)
