"""Confidence bounds: against scipy's beta quantiles, binomial tails, and simulated coverage."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from holdfast.certificates.smoothing.stopping import _tail, stopping
from holdfast.errors import InputError
from holdfast.utils.intervals import (
    binomial_lower,
    binomial_p_value,
    binomial_upper,
    clopper_pearson,
    looks,
    mean_interval,
    medals,
    standard_error,
)

RNG = np.random.default_rng(0)


def test_clopper_pearson_is_that_of_the_beta_quantiles_and_errs_to_the_safe_side():
    n = torch.tensor([1, 10, 1000, 100_000]).repeat_interleave(12)
    k = (torch.rand(48, dtype=torch.float64) * (n + 1)).long()
    k[:8] = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    for alpha in (0.001, 0.05):
        lower, upper = binomial_lower(k, n, alpha), binomial_upper(k, n, alpha)
        inside = k > 0
        expected = torch.from_numpy(stats.beta.ppf(alpha, k[inside], n[inside] - k[inside] + 1))
        torch.testing.assert_close(lower[inside], expected, rtol=1e-9, atol=0)
        assert bool((lower[~inside] == 0).all())
        below = k < n
        expected = torch.from_numpy(stats.beta.ppf(1 - alpha, k[below] + 1, n[below] - k[below]))
        torch.testing.assert_close(upper[below], expected, rtol=1e-9, atol=0)
        assert bool((upper[~below] == 1).all())
        # The definition: at the bound, the tail is no larger than alpha.
        assert bool((stats.binom.sf(k[inside] - 1, n[inside], lower[inside]) <= alpha).all())
        assert bool((stats.binom.cdf(k[below], n[below], upper[below]) <= alpha).all())


@given(count=st.integers(0, 60), more=st.integers(0, 60), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_the_interval_of_a_share_is_the_exact_one(count, more, confidence):
    total = max(count + more, 1)
    expected = stats.binomtest(count, total).proportion_ci(confidence, method="exact")
    assert clopper_pearson(count, total, confidence=confidence) == pytest.approx(
        (expected.low, expected.high), abs=1e-9
    )


def test_bounds_broadcast_and_know_all_hits():
    assert float(binomial_lower(torch.tensor(1000), 1000, 0.001)) == pytest.approx(0.001 ** (1 / 1000), rel=1e-9)
    grid = binomial_lower(torch.tensor([[3], [5]]), torch.tensor([10, 20]), torch.tensor([0.1, 0.01]))
    assert grid.shape == (2, 2)
    assert grid.dtype == torch.float64
    assert binomial_lower(torch.zeros(0, dtype=torch.long), 5, 0.1).shape == (0,)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, math.nan])
def test_alpha_must_be_a_probability(alpha):
    with pytest.raises(InputError, match=r"alpha .* must lie in \(0, 1\)"):
        looks(100, alpha)


def test_more_successes_than_trials_are_refused():
    with pytest.raises(InputError, match="more successes than trials"):
        binomial_lower(torch.tensor([3]), 2, 0.1)


def test_the_test_of_two_classes_is_scipys_binomial_test():
    pairs = [(0, 0), (5, 5), (9, 1), (1, 9), (60, 40), (100, 0)]
    first, second = (torch.tensor(column) for column in zip(*pairs, strict=True))
    expected = [stats.binomtest(a, a + b).pvalue if a + b else 1.0 for a, b in pairs]
    assert binomial_p_value(first, second).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("interval", ["bernstein", "hoeffding"])
def test_intervals_of_a_mean_cover_it(interval):
    samples = torch.from_numpy(RNG.beta(0.5, 4, size=(400, 2000))) * 3 - 1
    truth = 3 * 0.5 / 4.5 - 1
    lower, upper = mean_interval(samples, -1, 2, 0.05, interval=interval)
    assert float(((lower > truth) | (upper < truth)).double().mean()) < 0.1
    assert bool((lower < samples.mean(0)).all())


def test_bernstein_gains_from_a_small_variance_and_the_range_is_checked():
    samples = torch.full((1000,), 0.5) + 0.001 * torch.randn(1000).clamp(-3, 3)
    widths = {i: float(mean_interval(samples, 0, 1, 0.01, interval=i)[1]) - 0.5 for i in ("bernstein", "hoeffding")}
    assert widths["bernstein"] < widths["hoeffding"] / 2
    with pytest.raises(InputError, match="outside"):
        mean_interval(samples, 0, 0.4, 0.01)
    with pytest.raises(InputError, match="finite range"):
        mean_interval(samples, 0, math.inf, 0.01)


@pytest.mark.parametrize("cap", [1, 99, 100, 125, 1050, 100_000])
def test_looks_grow_to_the_cap_and_spend_alpha_once(cap):
    found = looks(cap, 0.001)
    assert found.sizes[-1] == cap
    assert list(found.sizes) == sorted(set(found.sizes))
    assert all(size % 100 == 0 for size in found.sizes[:-1])
    assert sum(found.alphas) == pytest.approx(0.001)
    assert found.alphas[-1] >= 0.0006


def simulate(p, test):
    """Hits, drawn and lower bounds of one sequential run for each p."""
    hits, drawn = torch.zeros(len(p), dtype=torch.long), torch.zeros(len(p), dtype=torch.long)
    lower = torch.zeros(len(p), dtype=torch.float64)
    while len(active := test.undecided(hits, drawn, lower).nonzero()[:, 0]):
        goal = test.next_look(drawn[active])
        hits[active] += torch.from_numpy(RNG.binomial(goal - drawn[active], p[active]))
        drawn[active] = goal
        lower[active] = torch.maximum(lower[active], test.lower(hits[active], goal))
    return hits, drawn, lower


@pytest.mark.parametrize(("p", "alpha"), [(0.6, 0.05), (0.9, 0.05), (0.99, 0.1)])
def test_a_false_proof_is_no_more_likely_than_alpha(p, alpha):
    runs = 2000
    # The hardest question: the target is the truth itself, so that every proof is false.
    *_, lower = simulate(torch.full((runs,), p, dtype=torch.float64), stopping(looks(2000, alpha), torch.tensor([p])))
    wrong = int((lower > p).sum())
    assert stats.binomtest(wrong, runs, alpha, alternative="greater").pvalue > 1e-3
    # Looking as often at the full alpha each time fails far more often.
    often = 0
    for _ in range(200):
        hits = np.cumsum(RNG.random(2000) < p)[99::100]
        often += bool((binomial_lower(torch.from_numpy(hits), torch.arange(100, 2001, 100), alpha) > p).any())
    assert often > 2 * alpha * 200 * 0.75


def test_adaptive_decides_as_the_fixed_scheme_does_with_fewer_samples():
    p = torch.cat([torch.linspace(0.5, 1, 300), torch.ones(200)]).double()
    targets = torch.tensor([0.7, 0.9])
    hits, drawn, lower = simulate(p, stopping(looks(20_000, 0.001), targets))
    fixed = binomial_lower(torch.from_numpy(RNG.binomial(20_000, p)), 20_000, 0.001)
    assert float(((lower[:, None] > targets) != (fixed[:, None] > targets)).double().mean()) < 0.01
    assert float(drawn.double().mean()) < 0.15 * 20_000
    assert bool((hits <= drawn).all())


def test_what_cannot_be_proved_is_given_up_before_a_sample_is_drawn():
    test = stopping(looks(1000, 0.001), torch.tensor([0.9999]))
    assert int(test.needed) == 1001
    zeros = torch.zeros(3, dtype=torch.long)
    assert not bool(test.undecided(zeros, zeros, zeros.double()).any())
    assert bool((test.left(zeros, zeros, zeros.double()) == 0).all())


def test_without_targets_the_sample_goes_to_the_cap():
    test = stopping(looks(500, 0.01), torch.zeros(0))
    *_, drawn, lower = simulate(torch.tensor([0.5, 1.0]), test)
    assert drawn.tolist() == [500, 500]
    assert float(lower[1]) > 0.98


def test_intervals_of_a_mean_by_hand():
    """100 values, half 0 and half 2, in the range [-1, 3]: mean 1, variance 100 / 99."""
    values = torch.tensor([0.0, 2.0] * 50, dtype=torch.float64)
    width = 4 * math.sqrt(math.log(1 / 0.05) / 200)
    lower, upper = mean_interval(values, -1.0, 3.0, 0.05, interval="hoeffding")
    assert [float(lower), float(upper)] == pytest.approx([1 - width, 1 + width], rel=1e-9)
    log = math.log(2 / 0.05)
    width = math.sqrt(2 * 100 / 99 * log / 100) + 7 * 4 * log / (3 * 99)
    lower, upper = mean_interval(values, -1.0, 3.0, 0.05)
    assert [float(lower), float(upper)] == pytest.approx([1 - width, 1 + width], rel=1e-9)


@pytest.mark.parametrize(
    ("missing", "left", "p"), [(3, 10, 0.2), (10, 10, 0.7), (1, 5, 0.01), (0, 4, 0.5), (6, 5, 0.9)]
)
def test_the_chance_of_enough_further_hits_is_the_tail_of_a_binomial(missing, left, p):
    found = _tail(torch.tensor([missing]), torch.tensor([left]), torch.tensor([p], dtype=torch.float64))
    assert float(found) == pytest.approx(stats.binom.sf(missing - 1, left, p), rel=1e-9)


def test_nothing_is_claimed_between_two_looks():
    when = looks(1000, 0.001)
    test = stopping(when, torch.tensor([0.6]))
    assert 150 not in when.sizes
    drawn = torch.tensor([when.sizes[0], 150, 1000])
    claimed = test.lower(drawn, drawn)  # every sample was a hit
    share = torch.tensor([when.alphas[0], 1.0, when.alphas[-1]], dtype=torch.float64)
    assert claimed.tolist() == pytest.approx([float(share[0] ** (1 / drawn[0])), 0.0, float(share[2] ** (1 / 1000))])


def test_the_rule_of_gold_and_silver():
    """Column ViT-L16, CIFAR-10 of Table 1 in Wang et al., 2023: AT and TRADES, each a block of its own, n = 10,000."""
    assert standard_error(50_000) == pytest.approx(0.0022, abs=5e-5)
    at = [0.608, 0.617, 0.602, 0.624, 0.617]
    assert medals(at, 10_000) == ["", "silver", "", "gold", "silver"]
    trades = [0.603, 0.607, 0.616, 0.608, 0.614]
    assert medals(trades, 10_000) == ["", "silver", "gold", "silver", "silver"]
    # At the very edge, two standard errors apart, it is silver; twice the best are both gold.
    assert medals([0.6, 0.59, 0.5899, 0.6], 10_000) == ["gold", "silver", "", "gold"]
    with pytest.raises(InputError, match="at least 1"):
        standard_error(0)


TABLE_1 = {  # robust accuracy of base, SWA, S2O, AWP and TrH in Table 1 of Wang et al., 2023, n = 10,000
    "AT": ((60.8, 61.7, 60.2, 62.4, 61.7), (31.7, 31.7, 31.7, 32.6, 32.8), (61.7, 57.2, 61.6, 61.5, 61.0),
           (31.8, 30.8, 31.8, 32.5, 32.4)),
    "TRADES": ((60.3, 60.7, 61.6, 60.8, 61.4), (31.4, 32.0, 31.6, 32.2, 32.1), (60.8, 59.4, 61.5, 59.8, 61.7),
               (30.6, 29.9, 31.9, 32.1, 34.1)),
}  # fmt: skip


def test_the_published_tally_of_gold_and_silver_follows_from_the_published_table():
    won = [medals([a / 100 for a in column], 10_000) for block in TABLE_1.values() for column in block]
    tally = [[[row[k] for row in won].count(medal) for medal in ("gold", "silver")] for k in range(5)]
    assert tally == [[1, 3], [0, 3], [1, 4], [3, 3], [3, 5]]
    # One underlined cell of the table, TRADES with AWP on Hybrid-L16, CIFAR-10, breaks the rule: 1.9 below the best.
    assert won[6][3] == ""
