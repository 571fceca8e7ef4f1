"""Guess and check on a threshold classifier, where everything is known: distribution, waits, volumes, resuming."""

import pytest
import torch
from scipy import stats
from torch import nn

import holdfast as hf
from holdfast.analyze.volume.family import block_seed
from holdfast.analyze.volume.fitting import make_bins, make_fitting
from holdfast.analyze.volume.guess_and_check import guess_and_check, unreached, volumes
from holdfast.utils.clock import now, until


class Threshold(nn.Module):
    """Class 1 if x > t, t uniform on [-1, 1]: t in [-0.2, 0.3) fits, which is a quarter."""

    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return torch.cat([torch.zeros_like(x), x - self.t], 1)


@pytest.fixture(scope="module")
def threshold():
    return make_fitting(Threshold(), torch.tensor([[-0.2], [0.3]]), torch.tensor([0, 1]), divisor=None)


@pytest.fixture(scope="module")
def lenet():
    torch.manual_seed(0)
    x, y = torch.randn(5, 1, 16, 16), torch.tensor([0, 0, 1, 1, 0])
    return make_fitting(hf.make_model("lenet", input_shape=(1, 16, 16), classes=2, width=0.2).eval(), x, y)


def test_accepted_weights_are_uniform_on_what_fits(threshold):
    found = guess_and_check(threshold, limit=20_000, keep=20_000, stop=False, block=1000, chunk=1000)
    t = found.weights[:, 0]
    assert len(t) == found.accepted == int(found.hits[0])
    assert stats.kstest(t.numpy(), stats.uniform(-0.2, 0.5).cdf).pvalue > 0.01
    assert stats.kstest(t.numpy(), stats.uniform(-0.2, 0.48).cdf).pvalue < 1e-6  # the test can tell
    (share,) = volumes(found, each=None)
    assert share.low < 0.25 < share.high
    assert share.guesses == 20_000


def test_waits_are_geometric(threshold):
    waits = [int(guess_and_check(threshold, block=64, seed=seed).waits[0]) for seed in range(400)]
    seen = [waits.count(n) for n in range(1, 7)] + [sum(w > 6 for w in waits)]
    expected = [400 * 0.25 * 0.75 ** (n - 1) for n in range(1, 7)] + [400 * 0.75**6]
    assert stats.chisquare(seen, expected).pvalue > 0.01


def test_every_network_fits_and_lies_in_its_bin(lenet):
    bins = [(0.5, 0.55), (0.55, 0.65)]
    found = guess_and_check(lenet, bins, each=3, limit=4000, block=64)
    accuracy, loss = lenet.measure(found.weights)
    assert found.bin.tolist().count(0) == found.bin.tolist().count(1) == 3
    assert bool((accuracy == 1).all())
    for i, (low, high) in enumerate(bins):
        inside = loss[found.bin == i]
        assert bool(((inside > low) & (inside <= high)).all())
    assert torch.allclose(loss, found.loss)


def test_early_rejection_changes_nothing(lenet):
    """All guesses measured whole, by the definition."""
    found = guess_and_check(lenet, limit=512, keep=512, stop=False, block=128, seed=2)
    drawn = torch.cat([lenet.family.draw(128, seed=block_seed(2, i), like=lenet.x) for i in range(4)])
    fits = lenet.measure(drawn)[0] == 1
    assert 0 < found.accepted == int(fits.sum())
    assert torch.equal(found.weights, drawn[fits])
    first = int(fits.nonzero()[0]) + 1
    assert int(guess_and_check(lenet, block=128, seed=2).waits[0]) == first


def test_an_interrupted_search_goes_on_as_if_nothing_had_happened(lenet):
    bins = make_bins(0.5, 0.7, 0.1)
    how = {"block": 64, "seed": 1, "stop": False, "each": 2}
    whole = guess_and_check(lenet, bins, limit=1024, **how)
    part = guess_and_check(lenet, bins, limit=300, **how)
    assert part.tried == 320
    again = guess_and_check(lenet, bins, limit=1024, begin=part, **how)
    for name in ("weights", "bin", "loss", "hits", "waits"):
        assert torch.equal(getattr(whole, name), getattr(again, name)), name
    assert (whole.tried, whole.accepted) == (again.tried, again.accepted)


def test_the_watcher_sees_every_block_and_the_deadline_is_kept(threshold):
    seen = []
    guess_and_check(threshold, limit=300, stop=False, block=100, watch=lambda found: seen.append(found.tried))
    assert seen == [100, 200, 300]
    with until(now() - 1):
        assert guess_and_check(threshold, limit=300).tried == 0


def test_a_bin_that_nothing_reaches_says_so(threshold):
    bins = [(-1.0, 0.0), (0.0, 10.0)]  # a cross-entropy is positive
    found = guess_and_check(threshold, bins, limit=1000, block=100, chunk=100)
    (line,) = unreached(found, bins)
    assert line.startswith("loss (-1, 0]: 0 of 1 networks in 1,000 guesses, of which ")
    assert f"{found.accepted} fit all samples" in line
    assert "at most 3.7e-03" in line
    assert "guesses a second it takes more than" in line
    assert volumes(found)[1].until
    assert not volumes(found)[0].until
    with pytest.raises(hf.InputError, match="must not overlap"):
        guess_and_check(threshold, [(0.0, 1.0), (0.5, 2.0)])
