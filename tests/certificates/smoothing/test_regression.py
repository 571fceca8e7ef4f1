"""Any function with real values, smoothed: closed forms for linear functions, the fields, and what is refused."""

import math

import pytest
import torch
from scipy import stats

from holdfast.certificates.smoothing.percentile import mean_bounds, percentile_bounds
from holdfast.certificates.smoothing.regression import certify_mean, certify_percentile, draw_values
from holdfast.errors import InputError

X = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]], dtype=torch.float64)
W = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64)  # of norm 3


def linear(x):
    return torch.stack([x @ W, -(x @ W)], 1)


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_bounds_of_a_linear_function_hold_and_are_tight(p):
    bounds = certify_percentile(linear, X, 0.4, 0.5, n=20_000, p=p)
    true = linear(X) + 0.5 * 3 * stats.norm.ppf(p)  # the percentile at x; it moves by epsilon |w| = 1.2
    assert bounds.lower.shape == bounds.upper.shape == (2, 2)
    assert bool((bounds.lower <= true - 1.2 + 0.02).all())
    assert bool((bounds.upper >= true + 1.2 - 0.02).all())
    assert bool((bounds.lower >= true - 1.2 - 0.25).all())
    assert bool((bounds.upper <= true + 1.2 + 0.25).all())
    assert torch.allclose(bounds.median, true, atol=0.06)


def test_no_input_within_the_radius_leaves_the_bounds():
    def f(x):
        return x.square().sum(1) + 3 * torch.sin(4 * x[:, 0])

    bounds = certify_percentile(f, X, 0.3, 0.5, n=4000, confidence=0.9999)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        move = torch.randn(X.shape, generator=generator, dtype=X.dtype)
        moved = X + 0.299 * move / move.norm(dim=1, keepdim=True)
        fresh = draw_values(f, moved, 0.5, n=4000, batch=1000, seed=9).median(0).values
        assert bool(((bounds.lower <= fresh) & (fresh <= bounds.upper)).all())


def test_the_mean_of_a_step_attains_its_bound():
    def step(x):
        return (x @ W > 0).double()

    x = torch.zeros(1, 3, dtype=torch.float64)
    bounds = certify_mean(step, x, 0.5, 1.0, low=0.0, high=1.0, n=100_000, batch=10_000)
    assert float(bounds.lower) <= float(stats.norm.cdf(-0.5)) <= float(bounds.lower) + 0.02
    assert float(bounds.upper) - 0.02 <= float(stats.norm.cdf(0.5)) <= float(bounds.upper)


def test_the_result_says_what_it_rests_on():
    bounds = certify_percentile(linear, X, 0.1, 0.5, n=500, confidence=0.99, familywise=True, seed=3)
    assert (bounds.epsilon, bounds.sigma, bounds.n, bounds.p) == (0.1, 0.5, 500, 0.5)
    assert (bounds.confidence, bounds.familywise, bounds.seed) == (0.99, True, 3)
    alone = percentile_bounds(draw_values(linear, X, 0.5, n=500, batch=7, seed=3), 0.1, 0.5, confidence=0.99)
    assert alone.seed is None
    assert not alone.familywise
    # Four values of two inputs share the risk: eight bounds.
    each = percentile_bounds(draw_values(linear, X, 0.5, n=500, batch=7, seed=3), 0.1, 0.5, confidence=1 - 0.01 / 8)
    assert torch.equal(bounds.lower, each.lower)
    assert torch.equal(bounds.upper, each.upper)
    assert bool((bounds.lower < alone.lower).all())


def test_family_wise_means_share_the_risk():
    samples = torch.rand(300, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    how = {"low": 0.0, "high": 1.0}
    together = mean_bounds(samples, 0.1, 1.0, confidence=0.9, familywise=True, **how)
    each = mean_bounds(samples, 0.1, 1.0, confidence=1 - 0.1 / 12, **how)
    assert torch.equal(together.lower, each.lower)
    assert (together.confidence, together.familywise, together.n) == (0.9, True, 300)


def test_batch_and_neighbours_do_not_matter_and_the_seed_does():
    one = certify_percentile(linear, X, 0.1, 0.5, n=300, batch=7)
    two = certify_percentile(linear, X, 0.1, 0.5, n=300, batch=1000)
    assert torch.allclose(one.lower, two.lower)
    assert torch.allclose(certify_percentile(linear, X[:1], 0.1, 0.5, n=300).upper, one.upper[:1])
    assert not torch.equal(certify_percentile(linear, X, 0.1, 0.5, n=300, seed=1).lower, one.lower)


def test_what_cannot_be_smoothed_is_refused():
    with pytest.raises(InputError, match="the smallest n that does is 148"):
        certify_percentile(linear, X, 1.44, 1.0, n=147, confidence=0.99999)
    with pytest.raises(InputError, match="deterministic"):
        certify_percentile(lambda x: torch.rand(len(x)), X, 0.1, 1.0)
    with pytest.raises(InputError, match=r"real values of shape \(1, ...\)"):
        certify_percentile(lambda x: x.argmax(1), X, 0.1, 1.0)
    with pytest.raises(InputError, match="got float"):
        certify_percentile(lambda x: math.pi, X, 0.1, 1.0)
    with pytest.raises(InputError, match="NaN"):
        certify_percentile(lambda x: (x[:, 0] * 0 + 1).masked_fill(x[:, 0] > 1.2, torch.nan), X, 0.1, 1.0)
    with pytest.raises(InputError, match="NaN or infinite"):
        certify_percentile(linear, X / 0, 0.1, 1.0)
    with pytest.raises(InputError, match="n and batch"):
        certify_mean(linear, X, 0.1, 1.0, low=0, high=1, n=0)
