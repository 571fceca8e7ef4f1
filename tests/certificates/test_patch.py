import itertools

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.certificates.patch import SHAPES, certify_shape, placements, shape_masks
from holdfast.errors import InputError
from holdfast.random import Noise


def task(name="cnn", batch=4):
    model, shape = tiny_nets()[name]
    x = torch.rand(batch, *shape)
    return model, x, model(x).argmax(1)


def test_all_locations_as_in_the_interval_certificate():
    model, x, y = task()
    for patch in (hf.Patch(2, 3), hf.Patch(1, 1)):
        ours = hf.certify(model, x, y, patch, "patch").margin
        assert torch.allclose(ours, hf.certify(model, x, y, patch, "ibp").margin, atol=1e-6)


@pytest.mark.parametrize("pool", [2, 3, 4])
@pytest.mark.parametrize("name", ["cnn", "pooled"])
def test_pooling_is_sound_and_looser(name, pool):
    model, x, y = task(name)
    patch = hf.Patch(2, 2)
    every, pooled = (hf.certify(model, x, y, patch, "patch", pool=p).margin for p in (1, pool))
    assert bool((pooled <= every + 1e-6).all())
    assert bool((pooled < every - 1e-4).any())
    for draw in range(50):
        point = patch.random_start(x, Noise.for_batch(draw, len(x)))
        logits = model(point)
        reached = logits.gather(1, y[:, None])[:, 0] - logits.scatter(1, y[:, None], -torch.inf).amax(1)
        assert bool((reached >= pooled - 1e-5).all())


@pytest.mark.parametrize("count", [1, 12])
def test_giving_up_early_changes_nothing_but_the_margins_of_those_that_fail(count):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).eval()
    x = torch.rand(count, 1, 5, 6)
    y = model(x).argmax(1)
    for patch in (hf.Patch(1, 1), hf.Patch(2, 3)):
        whole, early = (hf.certify(model, x, y, patch, "patch", early=early) for early in (False, True))
        assert torch.equal(whole.certified, early.certified)
        assert torch.equal(whole.margin[whole.certified], early.margin[whole.certified])
        assert bool((early.margin[~whole.certified] == -torch.inf).all())
        assert whole.by == early.by
    assert count < 12 or 0 < int(hf.certify(model, x, y, hf.Patch(1, 1), "patch").certified.sum()) < 12
    with pytest.raises(InputError, match="not both"):
        hf.certify(model, x, y, hf.Patch(1, 1), "patch", early=True, pool=2)


def test_pooling_by_hand():
    """One interval pass on the union of the first-layer boxes of each group."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    x = torch.rand(2, 1, 3, 4)
    y = model(x).argmax(1)
    ours = hf.certify(model, x, y, hf.Patch(1, 1), "patch", pool=2, sound=False).margin
    worst = torch.full((2,), torch.inf)
    for top, left in itertools.product(range(0, 3, 2), range(0, 4, 2)):
        lows, highs = [], []
        for row, column in itertools.product(range(top, min(top + 2, 3)), range(left, min(left + 2, 4))):
            lower, upper = x.clone(), x.clone()
            lower[:, :, row, column], upper[:, :, row, column] = 0, 1
            centre, radius = (lower + upper).flatten(1) / 2, (upper - lower).flatten(1) / 2
            middle, spread = model[1](centre), radius @ model[1].weight.abs().T
            lows.append(middle - spread)
            highs.append(middle + spread)
        low, high = torch.relu(torch.stack(lows).amin(0)), torch.relu(torch.stack(highs).amax(0))
        for i, j in itertools.product(range(2), range(3)):
            if j == y[i]:
                continue
            row = model[3].weight[y[i]] - model[3].weight[j]
            value = row @ (low[i] + high[i]) / 2 - row.abs() @ (high[i] - low[i]) / 2
            value = value + model[3].bias[y[i]] - model[3].bias[j]
            worst[i] = torch.minimum(worst[i], value)
    assert torch.allclose(ours, worst, atol=1e-5)


@pytest.mark.parametrize("pixels", [4, 16, 25])
def test_shapes_have_the_pixels_they_promise(pixels):
    for shape in SHAPES:
        for mask in shape_masks(shape, pixels):
            extra = 2 if shape == "rectangle" else 0
            assert pixels <= int(mask.sum()) <= pixels + extra, shape
            assert bool(mask.any(0).all())
            assert bool(mask.any(1).all())
    assert shape_masks("diamond", 13)[0].tolist() == [
        [abs(i) + abs(j) <= 2 for j in range(-2, 3)] for i in range(-2, 3)
    ]
    assert {tuple(m.shape) for m in shape_masks("rectangle", 4)} == {(2, 3), (3, 2)}


AROUND_A_PIXEL, AROUND_A_CORNER, BETWEEN_TWO = (1, 5, 13, 25, 41, 61), (12, 24, 40, 60), (2, 8, 18, 32, 50)
"""Sizes of L1 balls, by where their centre is; around a corner of four pixels, 4 of them are a square."""


def picture(mask):
    return ["".join("#" if pixel else "." for pixel in row) for row in mask.tolist()]


def connected(mask):
    """Whether all pixels can be reached from one of them by steps to the four neighbours."""
    left = {tuple(place) for place in mask.nonzero().tolist()}
    reached = [left.pop()]
    for row, column in reached:
        near = {(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)} & left
        left -= near
        reached += near
    return not left


@pytest.mark.parametrize("pixels", range(1, 65))
def test_a_diamond_has_its_pixels_in_one_piece_and_is_no_square(pixels):
    (mask,) = shape_masks("diamond", pixels)
    assert int(mask.sum()) == pixels
    assert connected(mask)
    assert torch.equal(mask, mask.flip(1))  # left and right
    assert bool(mask.any(0).all())
    assert bool(mask.any(1).all())
    assert pixels <= 3 or not bool(mask.all())  # neither a square nor a rectangle
    if pixels in {*AROUND_A_PIXEL, *AROUND_A_CORNER, *BETWEEN_TWO}:
        assert torch.equal(mask, mask.flip(0))
        assert pixels in BETWEEN_TWO or torch.equal(mask, mask.T)


@pytest.mark.parametrize("radius", range(6))
def test_a_whole_ball_is_a_diamond(radius):
    axis = torch.arange(-radius, radius + 1)
    ball = axis.abs()[:, None] + axis.abs() <= radius
    assert int(ball.sum()) == AROUND_A_PIXEL[radius]
    assert torch.equal(shape_masks("diamond", AROUND_A_PIXEL[radius])[0], ball)


def test_the_tips_of_a_diamond_come_first():
    """The other way round, 9 pixels are a square, 4 with the centre at a corner likewise, and 16 too."""
    drawn = {n: picture(shape_masks("diamond", n)[0]) for n in (4, 7, 9, 12, 16, 21)}
    assert drawn[4] == [".#.", "###"]
    assert drawn[7] == ["..#..", "#####", "..#.."]
    assert drawn[9] == ["..#..", "..#..", "#####", "..#..", "..#.."]
    assert drawn[12] == [".##.", "####", "####", ".##."]
    assert drawn[16] == ["...#...", "...#...", "..###..", "#######", "..###..", "...#..."]
    assert drawn[21] == ["...#...", "...#...", ".#####.", "#######", ".#####.", "...#...", "...#..."]


@pytest.mark.parametrize("pixels", range(4, 65))
def test_of_the_outer_ring_of_a_diamond_no_nearer_pixel_is_taken_before_a_farther_one(pixels):
    """Around the pixel where the longest row and the longest column meet; the lower tip of an odd ring comes last."""
    (mask,) = shape_masks("diamond", pixels)
    if pixels in {*AROUND_A_CORNER, *BETWEEN_TWO}:
        return
    middle = torch.stack([mask.sum(1 - d).argmax() for d in (0, 1)])
    canvas = torch.nn.functional.pad(mask, (20, 20, 20, 20))
    place = torch.stack(torch.meshgrid(*(torch.arange(size) for size in canvas.shape), indexing="ij")) - 20
    away = place - middle[:, None, None]
    near, far = away.abs().sum(0), away.square().sum(0)
    ring = near == near[canvas].max()
    assert bool(canvas[near < near[canvas].max()].all())  # the ball inside is whole
    lower_tip = (away[1] == 0) & (away[0] > 0) & (pixels % 2 == 0)
    taken, left = ring & canvas, ring & ~canvas & ~lower_tip
    assert not bool(left.any()) or int(far[taken].min()) >= int(far[left].max())


def test_placements_are_all_distinct_and_inside():
    mask = shape_masks("diamond", 13)[0]
    every = placements(mask, 7, 6)
    assert every.shape == ((7 - 5 + 1) * (6 - 5 + 1), 7, 6)
    assert len({tuple(m.flatten().tolist()) for m in every}) == len(every)
    assert bool((every.flatten(1).sum(1) == 13).all())


def test_a_shape_inside_a_square_certifies_at_least_as_well():
    model, x, y = task("cnn", 6)
    square = hf.certify(model, x, y, hf.Patch(3, 3), "patch").margin
    # 5 pixels in the L1 ball of radius 1 fit into 3 x 3
    assert bool((certify_shape(model, x, y, "diamond", 5).margin >= square - 1e-6).all())
    same = certify_shape(model, x, y, "square", 9).margin
    assert torch.allclose(same, square, atol=1e-6)


@pytest.mark.parametrize("shape", ["diamond", "parallelogram", "line"])
def test_a_shape_on_a_linear_model_equals_brute_force(shape):
    """Every placement, and every choice of 0 or 1 for each of its pixels: the certificate frees these and no others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 3)).eval()
    x = torch.rand(8, 1, 5, 6)
    y = model(x).argmax(1)
    worst = torch.full((8,), torch.inf)
    for mask in shape_masks(shape, 4):
        h, w = mask.shape
        for top, left in itertools.product(range(5 - h + 1), range(6 - w + 1)):
            for values in itertools.product([0.0, 1.0], repeat=4):
                changed = x.clone()
                changed[:, :, top : top + h, left : left + w][:, :, mask] = torch.tensor(values)
                logits = model(changed)
                others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
                worst = torch.minimum(worst, logits.gather(1, y[:, None])[:, 0] - others)
    assert torch.allclose(certify_shape(model, x, y, shape, 4, sound=False).margin, worst, atol=1e-5)
    assert bool((certify_shape(model, x, y, shape, 4).margin <= worst).all())


def test_bad_use_is_refused():
    model, x, y = task()
    with pytest.raises(InputError, match="pool"):
        hf.certify(model, x, y, hf.Patch(1, 1), "patch", pool=0)
    with pytest.raises(InputError, match="Did you mean 'diamond'"):
        certify_shape(model, x, y, "diamnd", 4)
    with pytest.raises(InputError, match="square number"):
        certify_shape(model, x, y, "square", 5)
    with pytest.raises(InputError, match="at least one pixel"):
        certify_shape(model, x, y, "diamond", 0)
    with pytest.raises(InputError, match="does not fit"):
        certify_shape(model, x, y, "line", 16)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(70, 3)).eval()
    with pytest.raises(InputError, match="bound pooling"):
        hf.certify(flat, torch.rand(1, 2, 7, 5), torch.tensor([0]), hf.Patch(1, 1), "patch", pool=2)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("text", ["patch:2x3", "patch:diamond:5", "patch:line:3"])
def test_the_worst_place_and_class_have_the_smallest_margin_by_brute_force(text, early):
    """On a linear model intervals are exact: the worst corner of each box, place by place and class by class."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 4)).eval()
    x = torch.rand(6, 1, 5, 6)
    y, threat = model(x).argmax(1), hf.threat(text)
    weight, bias, places = model[1].weight.detach().view(4, 5, 6), model[1].bias.detach(), threat.locations((1, 5, 6))
    masks = threat.masks(places, (1, 5, 6))[:, 0]
    found = hf.certify(model, x, y, threat, "patch", early=early, sound=False)
    smallest = {}
    for i, (image, label) in enumerate(zip(x[:, 0], y.tolist(), strict=True)):
        for place, mask in zip(places.tolist(), masks, strict=True):
            for k in set(range(4)) - {label}:
                w = weight[label] - weight[k]
                worst = torch.where(mask, (w < 0).float(), image)  # 0 where the weight helps, 1 where it hurts
                value = float((w * worst).sum() + bias[label] - bias[k])
                smallest[i, tuple(place[-2:]), k] = min(value, smallest.get((i, tuple(place[-2:]), k), float("inf")))
    for i in range(len(x)):
        at = smallest[i, tuple(found.worst_place[i].tolist()), int(found.worst_class[i])]
        if early and not bool(found.certified[i]):
            assert at <= 1e-5  # the first one that fails
        else:
            least = min(value for (j, _, _), value in smallest.items() if j == i)
            assert at == pytest.approx(least, abs=1e-5)
            assert float(found.margin[i]) == pytest.approx(least, abs=1e-5)
    assert bool((~found.certified).any())


def test_other_certificates_of_patches_and_chunks_name_the_same_place():
    model, x, y = task("cnn", 5)
    whole = hf.certify(model, x, y, hf.Patch(2, 2), "patch")
    for method, options in (
        ("ibp", {}),
        ("ibp", {"chunk_boxes": 7}),
        ("patch", {"chunk_boxes": 7}),
        ("patch", {"chunk": 2}),
    ):
        found = hf.certify(model, x, y, hf.Patch(2, 2), method, **options)
        assert torch.equal(found.worst_place, whole.worst_place)
        assert torch.equal(found.worst_class, whole.worst_class)
    auto = hf.certify(model, x, y, hf.Patch(2, 2), "auto")
    assert auto.worst_place.shape == (5, 2)
    assert bool((auto.worst_class != y).all())
    assert hf.certify(model, x, y, hf.Linf(0.1), "ibp").worst_place is None
    assert hf.certify(model, x, y, hf.Patch(2, 2), "patch", pool=2).worst_place is None


def test_auto_certifies_shapes_by_the_certificate_of_patches():
    model, x, y = task("cnn", 5)
    diamond = hf.threat("patch:diamond:5")
    assert torch.equal(hf.certify(model, x, y, diamond).margin, certify_shape(model, x, y, "diamond", 5).margin)
    with pytest.raises(InputError, match="pooled over the places of a rectangle"):
        hf.certify(model, x, y, diamond, "patch", pool=2)
    with pytest.raises(hf.UnsupportedError, match="does not handle the threat 'patch:diamond:5'"):
        hf.certify(model, x, y, diamond, "ibp")
