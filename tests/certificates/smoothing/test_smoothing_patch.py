"""Derandomised smoothing: every patch on every binary image, and the votes by a slow count."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.certificates.smoothing.ablation import windows
from holdfast.certificates.smoothing.smoothing_patch import BandVotes


class Codes(nn.Module):
    """Random logits for each ablated binary image: a network without any structure that a proof could lean on."""

    def __init__(self, cells, classes, seed, favour):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(3**cells, classes, generator=generator)
        logits[:, 1] += favour
        self.register_buffer("logits", logits)
        self.register_buffer("place", 3 ** torch.arange(cells))

    def forward(self, x):
        digits = torch.where(x == 0.5, 2, (x > 0.5).long()).flatten(1)
        return self.logits[digits @ self.place]


def all_images(height, width):
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=height * width))).view(-1, 1, height, width)


def reachable(x, threat):
    """All binary images that differ from x (1, H, W) under one patch."""
    found = []
    for top, left in threat.locations(tuple(x.shape)).tolist():
        content = all_images(threat.height, threat.width)
        images = x.repeat(len(content), 1, 1, 1)
        images[:, :, top : top + threat.height, left : left + threat.width] = content
        found.append(images)
    return torch.cat(found)


CASES = [
    ("column", 1, (2, 4), (2, 1)),
    ("column", 2, (2, 5), (1, 1)),
    ("row", 1, (4, 2), (1, 2)),
    ("block", 1, (3, 3), (1, 1)),
]


@pytest.mark.parametrize(("part", "size", "shape", "patch"), CASES)
@pytest.mark.parametrize("threshold", [0.2, 0.5])
def test_no_patch_changes_a_certified_vote(part, size, shape, patch, threshold):
    model, threat = Codes(shape[0] * shape[1], 3, 0, 2.5).eval(), hf.Patch(*patch)
    smoothed = BandVotes(model, part=part, size=size, threshold=threshold).eval()
    images = all_images(*shape)[::7]
    winner = smoothed(images).argmax(1)
    results = [
        hf.certify(
            *(model, images, winner, threat, "smoothing-patch"),
            part=part,
            size=size,
            threshold=threshold,
            every_place=every,
        )
        for every in (True, False)
    ]
    proved, published = (result.certified for result in results)
    assert not bool((published & ~proved).any())
    assert bool((results[0].margin >= results[1].margin).all())
    assert int(proved.sum()) > 0
    for i in proved.nonzero()[:, 0].tolist():
        assert bool((smoothed(reachable(images[i], threat)).argmax(1) == winner[i]).all())


@pytest.mark.parametrize(("part", "size"), [("column", 2), ("row", 3), ("block", 2)])
def test_votes_equal_a_slow_count(part, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x, (height, width) = torch.rand(3, 2, 5, 4), (5, 4)
    starts = itertools.product(range(height) if part != "column" else [0], range(width) if part != "row" else [0])
    votes = torch.zeros(3, 3)
    for top, left in starts:
        rows = [(top + i) % height for i in range(height if part == "column" else size)]
        columns = [(left + i) % width for i in range(width if part == "row" else size)]
        seen = torch.full_like(x, 0.1)
        for r, c in itertools.product(rows, columns):
            seen[:, :, r, c] = x[:, :, r, c]
        votes += (model(seen).softmax(1) > 0.35).float()
    smoothed = [
        BandVotes(model, part=part, size=size, threshold=0.35, null=0.1, chunk_views=c)(x) for c in (1024, 1, 7)
    ]
    assert all(torch.equal(votes, found) for found in smoothed)
    assert BandVotes(model, part=part, size=size)(x[:0]).shape == (0, 3)


@given(st.integers(2, 9), st.data())
@settings(max_examples=30, deadline=None)
def test_a_patch_touches_as_many_positions_as_the_formula_says(length, data):
    size, patch = data.draw(st.integers(1, length)), data.draw(st.integers(1, length))
    place = data.draw(st.integers(0, length - patch))
    _, kept = windows("column", size, 3, length)
    touched = kept[:, place : place + patch].any(1)
    assert int(touched.sum()) == min(patch + size - 1, length)
    assert bool((kept.sum(0) == size).all())


class Fixed(nn.Module):
    """Position i of a row of pixels votes as its list says, K for no class; one pixel is seen at a time."""

    def __init__(self, answers, classes):
        super().__init__()
        self.answers, self.classes = torch.tensor(answers), classes

    def forward(self, x):
        seen = (x != 0.5).flatten(1).to(torch.uint8).argmax(1)
        return 20.0 * nn.functional.one_hot(self.answers[seen], self.classes + 1)[:, :-1].to(x)


@pytest.mark.parametrize(
    ("answers", "y", "published", "every"),
    [
        ([0, 0, 0, 1], 0, True, True),  # 3 >= 1 + 2: class 0 wins the tie that is left
        ([1, 1, 1, 0], 1, False, False),  # class 1 does not
        ([1, 1, 1, 1, 0], 1, True, True),
        ([0, 0, 1, 1], 0, False, False),
        ([0, 0, 0, 0, 0], 0, True, True),
        ([0, 1, 1, 1, 0], 0, False, False),
    ],
)
def test_ties_go_to_the_class_that_comes_first(answers, y, published, every):
    x = torch.zeros(1, 1, 1, len(answers))
    for every_place, expected in ((True, every), (False, published)):
        result = hf.certify(
            Fixed(answers, 2).eval(),
            x,
            torch.tensor([y]),
            hf.Patch(1, 1),
            "smoothing-patch",
            size=1,
            every_place=every_place,
        )
        assert result.certified.tolist() == [expected]
        assert result.by == ("smoothing-patch" if expected else "",)
        assert result.alpha == 0.0


def test_looking_at_every_place_proves_more():
    """Two neighbours never vote for class 0 both, so a patch that touches two positions takes one vote at most."""
    model = Fixed([0, 2, 0, 2, 0, 2, 0, 2, 1], 2).eval()
    x, y = torch.zeros(1, 1, 1, 9), torch.tensor([0])
    for every_place in (True, False):
        result = hf.certify(
            model, x, y, hf.Patch(1, 2), "smoothing-patch", size=1, threshold=0.6, every_place=every_place
        )
        assert result.certified.tolist() == [every_place]


def test_the_answer_does_not_depend_on_the_chunk():
    model, images = Codes(8, 3, 1, 1.0).eval(), all_images(2, 4)[::9]
    y = torch.ones(len(images), dtype=torch.int64)
    whole, *pieces = (
        hf.certify(model, images, y, hf.Patch(2, 1), "smoothing-patch", size=1, chunk=chunk, chunk_views=views)
        for chunk, views in ((256, 1024), (3, 1024), (1, 2))
    )
    assert 0 < int(whole.certified.sum()) < len(images)
    assert all(torch.equal(whole.margin, part.margin) and whole.by == part.by for part in pieces)


def test_a_model_that_is_wrong_on_the_whole_image_may_be_certified():
    """The proof is about the vote: the front door does not ask the model itself."""
    model = Fixed([1, 1, 1, 1, 1], 2).eval()
    model.answers[0] = 0  # what the whole image gets, whose first pixel is seen
    x, y = torch.zeros(2, 1, 1, 5), torch.tensor([1, 1])
    assert (model(x).argmax(1) == 0).all()
    assert hf.certify(model, x, y, hf.Patch(1, 1), "smoothing-patch", size=1).certified.all()


@pytest.mark.parametrize(
    ("threat", "options", "message"),
    [
        (hf.Patch(1, 1), {"size": 0}, "'size'.*expected an integer >= 1, got 0"),
        (hf.Patch(1, 1), {"size": 5}, "size: 1 to 4"),
        (hf.Patch(1, 1), {"part": "circle", "size": 1}, "'part'.*unknown value 'circle'"),
        (hf.Patch(1, 1), {"size": 1, "threshold": 1.0}, "'threshold'.*expected a number >= 0 and < 1, got 1.0"),
        (hf.Patch(1, 1), {"size": 1, "chunk_views": 0}, "'chunk_views'.*expected an integer >= 1, got 0"),
        (hf.Patch(9, 1), {"size": 1}, "does not fit"),
    ],
)
def test_what_makes_no_sense_is_refused(threat, options, message):
    with pytest.raises(hf.InputError, match=message):
        hf.certify(
            Fixed([0] * 8, 2).eval(), torch.zeros(1, 1, 2, 4), torch.tensor([0]), threat, "smoothing-patch", **options
        )


def test_vectors_have_no_bands():
    model = nn.Linear(4, 2).eval()
    with pytest.raises(hf.InputError, match="images"):
        BandVotes(model)(torch.rand(2, 4))
    with pytest.raises(hf.InputError, match="images"):
        hf.certify(model, torch.rand(2, 4), torch.zeros(2, dtype=torch.int64), hf.Patch(1, 1), "smoothing-patch")
