"""Percentile smoothing: golden ranks, exact and simulated coverage, closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from holdfast.certificates.smoothing.percentile import mean_bounds, order_ranks, percentile_bounds, smallest_samples
from holdfast.errors import InputError

RNG = np.random.default_rng(1)


def test_golden_ranks():
    assert order_ranks(2000, 0.36, 0.25, confidence=0.99999) == (102, 1899)
    radii = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
    golden = {
        10_000: [4093, 3335, 2639, 2024, 1502, 1077, 745],
        1000: [385, 310, 242, 182, 132, 92, 61],
        100: [31, 24, 17, 12, 8, 5, 2],
    }
    for n, ranks in golden.items():
        assert [order_ranks(n, r, 1.0, confidence=0.99)[0] for r in radii] == ranks


def test_the_published_upper_rank_is_one_too_small():
    """The sum of the paper starts at 1 and ends at q; its rank 1898 does not reach the confidence, 1899 does."""
    above = stats.norm.cdf(0.36 / 0.25)
    assert stats.binom.cdf(1898 - 1, 2000, above) < 0.99999 <= stats.binom.cdf(1899 - 1, 2000, above)


def test_limits():
    assert smallest_samples(1.44, 1.0, confidence=0.99999) == 148
    assert smallest_samples(1.44, 1.0, confidence=0.99) == 60
    assert order_ranks(2000, 2.52, 1.0, confidence=0.99999) == (1, 2000)
    assert order_ranks(2000, 2.54, 1.0, confidence=0.99999) == (None, None)
    assert order_ranks(10_000, 3.31, 1.0, confidence=0.99) == (1, 10_000)
    assert order_ranks(10_000, 3.32, 1.0, confidence=0.99) == (None, None)
    with pytest.raises(InputError, match="out of reach"):
        smallest_samples(40.0, 1.0, confidence=0.9)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3000),
    st.floats(0, 3),
    st.floats(0.05, 0.95),
    st.sampled_from([0.9, 0.99, 0.99999]),
)
def test_ranks_are_the_best_that_cover(n, epsilon, p, confidence):
    low, high = order_ranks(n, epsilon, 1.0, p=p, confidence=confidence)
    below, above = (stats.norm.cdf(stats.norm.ppf(p) + s * epsilon) for s in (-1, 1))
    fail, slack = 1 - confidence, 1e-9
    if low is not None:
        assert stats.binom.cdf(low - 1, n, below) <= fail * (1 + slack)
    assert stats.binom.cdf((low or 0) + 1 - 1, n, below) > fail * (1 - slack)
    if high is not None:
        assert stats.binom.sf(high - 1, n, above) <= fail * (1 + slack)
    assert stats.binom.sf((high or n + 1) - 2, n, above) > fail * (1 - slack)
    smallest = smallest_samples(epsilon, 1.0, p=p, confidence=confidence)
    assert (None in (low, high)) == (n < smallest)
    if p == 0.5 and low is not None:
        assert high == n + 1 - low


def test_symmetry_and_monotonicity():
    ranks = [order_ranks(501, e, 0.5, confidence=0.99) for e in (0.0, 0.2, 0.5)]
    for low, high in ranks:
        assert high == 502 - low
    assert ranks[0][0] > ranks[1][0] > ranks[2][0]
    assert order_ranks(501, 0.2, 0.5, confidence=0.9)[0] > ranks[1][0]
    assert order_ranks(1001, 0.2, 0.5, confidence=0.99)[0] / 1001 > ranks[1][0] / 501


def test_linear_function_the_bounds_hold_and_are_near_the_tight_ones():
    """For w.x + b the median moves by epsilon ||w|| at most, and by that in the direction of w."""
    w, epsilon, sigma = torch.tensor([3.0, 4.0]), 0.3, 0.5
    samples = 1.0 + sigma * torch.from_numpy(RNG.normal(size=(50_000, 2))) @ w.double()
    found = percentile_bounds(samples, epsilon, sigma, confidence=0.999)
    assert float(found.lower) <= 1 - epsilon * 5 + 1e-9
    assert float(found.upper) >= 1 + epsilon * 5 - 1e-9
    assert float(found.lower) == pytest.approx(1 - epsilon * 5, abs=0.15)
    assert float(found.upper) == pytest.approx(1 + epsilon * 5, abs=0.15)
    assert float(found.median) == pytest.approx(1, abs=0.1)
    assert found.confidence == 0.999


def test_a_step_function_keeps_inside_at_every_shift():
    """f = floor(2 x) of one number, with its exact median at each shift."""
    x, sigma, epsilon = 0.2, 0.5, 0.4
    samples = torch.from_numpy(np.floor(2 * (x + sigma * RNG.normal(size=4000))))
    found = percentile_bounds(samples, epsilon, sigma, confidence=0.9999)
    for shift in np.linspace(-epsilon, epsilon, 41)[1:-1]:
        # Median of a non-decreasing function of a normal variable.
        assert float(found.lower) <= np.floor(2 * (x + shift)) <= float(found.upper)
    assert float(found.upper) - float(found.lower) <= 3


def test_coverage_for_a_discrete_function_with_ties():
    """Accuracy on 10 items: many ties. The bound fails no more often than it says."""
    n, runs, epsilon, confidence = 100, 2000, 0.5, 0.9
    draws = torch.from_numpy(RNG.binomial(10, 0.7, size=(n, runs)))
    found = percentile_bounds(draws.double(), epsilon, 1.0, confidence=confidence)
    # sup {y : F(y) <= p} for the lower side, inf {y : F(y) >= p} for the upper side.
    cdf = stats.binom.cdf(np.arange(11), 10, 0.7)
    lower = float(np.argmax(cdf > stats.norm.cdf(-epsilon)))
    upper = float(np.argmax(cdf >= stats.norm.cdf(epsilon)))
    error = 3 * math.sqrt(confidence * (1 - confidence) / runs)
    assert float((found.lower <= lower).double().mean()) >= confidence - error
    assert float((found.upper >= upper).double().mean()) >= confidence - error


def test_coverage_for_a_continuous_function_is_that_of_the_binomial():
    n, runs, epsilon, confidence = 200, 4000, 0.5, 0.9
    samples = torch.from_numpy(RNG.normal(size=(n, runs)))
    found = percentile_bounds(samples, epsilon, 1.0, confidence=confidence)
    low, _ = order_ranks(n, epsilon, 1.0, confidence=confidence)
    exact = stats.binom.sf(low - 1, n, stats.norm.cdf(-epsilon))
    assert exact >= confidence
    assert float((found.lower <= -epsilon).double().mean()) == pytest.approx(exact, abs=0.02)


def test_infinite_samples_shapes_and_few_samples():
    samples = torch.randn(300, 2, 3)
    samples[:, 0, 0] = torch.inf
    samples[:200, 0, 1] = -torch.inf
    found = percentile_bounds(samples, 0.1, 1.0)
    assert found.lower.shape == found.median.shape == found.upper.shape == (2, 3)
    assert float(found.lower[0, 0]) == math.inf
    assert float(found.median[0, 1]) == -math.inf
    few = percentile_bounds(torch.randn(5, 4), 1.0, 0.5)
    assert few.lower.tolist() == [-math.inf] * 4
    assert few.upper.tolist() == [math.inf] * 4
    assert percentile_bounds(torch.randn(9), 0.1, 1.0).median.shape == ()


def test_familywise_is_wider_and_other_percentiles_lie_where_they_should():
    samples = torch.randn(1000, 8)
    one, all_ = (percentile_bounds(samples, 0.2, 1.0, familywise=f) for f in (False, True))
    assert bool((all_.lower < one.lower).all())
    assert bool((all_.upper > one.upper).all())
    high = percentile_bounds(samples, 0.2, 1.0, p=0.9)
    assert bool((high.median > one.median).all())
    assert bool((high.upper > one.upper).all())


def test_increasing_maps_of_the_function_move_the_bounds_with_it():
    samples = torch.randn(500)
    plain, mapped = (percentile_bounds(s, 0.3, 1.0) for s in (samples, 2 * samples + 3))
    for name in ("lower", "median", "upper"):
        torch.testing.assert_close(getattr(mapped, name), 2 * getattr(plain, name) + 3)


def test_a_heavy_tail_has_finite_percentiles_and_no_mean():
    samples = 1 / torch.from_numpy(RNG.normal(size=2000))
    found = percentile_bounds(samples, 0.3, 1.0)
    assert math.isfinite(float(found.lower))
    assert math.isfinite(float(found.upper))
    with pytest.raises(InputError, match="finite range"):
        mean_bounds(samples, 0.3, 1.0, low=-math.inf, high=math.inf)


def test_mean_of_a_half_space_attains_the_bound_and_a_clipped_line_keeps_inside():
    x, sigma, epsilon = 0.3, 0.5, 0.4
    noise = torch.from_numpy(RNG.normal(size=200_000)) * sigma + x
    half = mean_bounds((noise > 0).double(), epsilon, sigma, low=0, high=1)
    assert float(half.lower) <= stats.norm.cdf((x - epsilon) / sigma) <= float(half.upper)
    assert float(half.lower) == pytest.approx(stats.norm.cdf((x - epsilon) / sigma), abs=0.01)
    assert float(half.upper) == pytest.approx(stats.norm.cdf((x + epsilon) / sigma), abs=0.01)
    clipped = mean_bounds(noise.clamp(-1, 1), epsilon, sigma, low=-1, high=1, interval="hoeffding")
    z = np.linspace(-6, 6, 4001)
    for shift in np.linspace(-epsilon, epsilon, 9):
        values = np.clip(x + shift + sigma * z, -1, 1) * stats.norm.pdf(z)
        assert float(clipped.lower) <= np.trapezoid(values, z) <= float(clipped.upper)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": 0.0}, "sigma .* positive"),
        ({"sigma": math.nan}, "sigma .* positive"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"p": 1.0}, "p must lie"),
        ({"confidence": 1.0}, "confidence must lie"),
    ],
)
def test_bad_input_is_refused(change, message):
    good = {"epsilon": 0.1, "sigma": 0.5, "p": 0.5, "confidence": 0.9}
    with pytest.raises(InputError, match=message):
        percentile_bounds(torch.randn(10), **{**good, **change})


def test_bad_samples_are_refused():
    with pytest.raises(InputError, match="NaN"):
        percentile_bounds(torch.tensor([1.0, torch.nan]), 0.1, 0.5)
    with pytest.raises(InputError, match="n >= 1"):
        percentile_bounds(torch.zeros(0, 3), 0.1, 0.5)
    with pytest.raises(InputError, match="at least 1 sample"):
        order_ranks(0, 0.1, 0.5, confidence=0.9)


def test_the_bounds_are_the_order_statistics_of_the_golden_ranks():
    """2000 samples 1, ..., 2000 in any order: the value of a rank is the rank."""
    samples = torch.randperm(2000).double() + 1
    found = percentile_bounds(samples, 0.36, 0.25, confidence=0.99999)
    assert [float(found.lower), float(found.median), float(found.upper)] == [102, 1000, 1899]
    assert float(percentile_bounds(samples, 0.1, 0.25, p=0.9).median) == 1800
    assert float(percentile_bounds(samples[:5].sort().values, 0.0, 0.25).median) == samples[:5].median()


@pytest.mark.parametrize("coordinates", [1, 3, 50])
def test_all_bounds_together_share_the_probability_of_failure(coordinates):
    """Two sides of each coordinate: each may fail with probability (1 - confidence) / (2 coordinates)."""
    samples = torch.stack([torch.randperm(1000).double() + 1 for _ in range(coordinates)], 1)
    found = percentile_bounds(samples, 0.2, 1.0, confidence=0.9, familywise=True)
    each = stats.norm.cdf(-0.2)
    rank = max(q for q in range(1, 1001) if stats.binom.cdf(q - 1, 1000, each) <= 0.1 / (2 * coordinates))
    assert found.lower.tolist() == [rank] * coordinates
    assert found.upper.tolist() == [1001 - rank] * coordinates
