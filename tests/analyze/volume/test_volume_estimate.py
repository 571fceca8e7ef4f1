"""Volumes: unbiased with fixed guesses and at the k-th hit, exact intervals, and why 1 / N is no estimate."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

import holdfast as hf
from holdfast.analyze.volume.family import make_family
from holdfast.analyze.volume.volume_estimate import volume

P = 0.03


def geometric(n):
    return (1 - P) ** (n - 1) * P


def test_the_estimates_are_unbiased_and_one_over_n_is_not():
    fixed = sum(stats.binom.pmf(k, 50, P) * volume(k, 50).share for k in range(51))
    assert fixed == pytest.approx(P)
    until = sum(stats.nbinom.pmf(n - 3, 3, P) * volume(3, n, until=True).share for n in range(3, 800))
    assert until == pytest.approx(P, rel=1e-4)
    published = sum(geometric(n) / n for n in range(1, 5000))
    assert published == pytest.approx(P * math.log(1 / P) / (1 - P), rel=1e-6)
    assert published > 3 * P


def test_intervals_cover_at_least_as_often_as_they_say():
    covered = sum(stats.binom.pmf(k, 60, P) * (volume(k, 60).low <= P <= volume(k, 60).high) for k in range(61))
    assert covered >= 0.95
    found = [(n, volume(2, n, until=True)) for n in range(2, 500)]
    missed_low = sum(stats.nbinom.pmf(n - 2, 2, P) for n, v in found if v.high < P)
    missed_high = sum(stats.nbinom.pmf(n - 2, 2, P) for n, v in found if v.low > P)
    assert 0 < missed_low <= 0.025
    assert 0 < missed_high <= 0.025


def test_the_ends_are_where_the_tails_have_their_probability():
    """Guessing until hit k takes n guesses or more if n - 1 have fewer than k hits."""
    found = volume(2, 30, until=True)
    assert stats.binom.cdf(1, 29, found.high) == pytest.approx(0.025, rel=1e-6)
    assert stats.binom.sf(1, 30, found.low) == pytest.approx(0.025, rel=1e-6)


def test_no_hit_leaves_an_upper_end():
    none = volume(0, 10_000_000)
    assert none.low == none.share == 0
    assert none.high == pytest.approx(-math.log(0.025) / 1e7, rel=1e-3)
    assert volume(0, 10_000_000, confidence=0.9).high == pytest.approx(3 / 1e7, rel=2e-3)  # one-sided 95 %
    assert volume(5, 5).high == 1


def test_a_set_of_known_volume_of_weights():
    family = make_family(nn.Sequential(nn.Linear(1, 1)))
    inside = int((family.draw(20_000, seed=0)[:, 0] > 0.8).sum())
    found = volume(inside, 20_000)
    assert found.low < 0.1 < found.high


@pytest.mark.parametrize(("hits", "guesses", "until"), [(3, 2, False), (-1, 5, False), (0, 0, False), (0, 5, True)])
def test_impossible_counts_are_refused(hits, guesses, until):
    with pytest.raises(hf.InputError, match="expected 0 <= hits"):
        volume(hits, guesses, until=until)


def test_text_says_what_was_counted():
    assert str(volume(2, 8)) == "0.25 (0.032 to 0.65; 2 hits in 8 guesses)"
    assert "2 until hit 9" not in str(volume(2, 9))
    assert torch.isfinite(torch.tensor(volume(1, 1, until=True).share))
