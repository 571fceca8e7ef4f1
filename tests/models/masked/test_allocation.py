"""How many weights a layer keeps: exact totals, the published allocation, and both theorems by enumeration."""

import itertools
import math
import random

import pytest
import torch
from torch import nn

from holdfast.errors import InputError
from holdfast.models import make_model
from holdfast.models.masked import keep_counts


def allocations(sizes, total):
    """All ways to keep `total` weights, at least one in each layer."""
    for counts in itertools.product(*(range(1, size + 1) for size in sizes)):
        if sum(counts) == total:
            yield counts


def cases(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        sizes = [draw.randint(2, 12) for _ in range(draw.randint(2, 3))]
        yield sizes, draw.randint(len(sizes), sum(sizes) - 1)


def named(sizes):
    return {str(i): size for i, size in enumerate(sizes)}


def close_rates(sizes, counts):
    pairs = itertools.combinations(zip(sizes, counts, strict=True), 2)
    return all(abs(m / n - k / j) <= 1 / n + 1 / j + 1e-12 for (n, m), (j, k) in pairs)


def test_the_most_sub_networks_are_at_nearly_equal_rates():
    """Theorem 5.1: max of prod C(n_i, m_i) implies |m_j / n_j - m_k / n_k| <= 1 / n_j + 1 / n_k."""
    for sizes, total in cases(100, 0):

        def ways(counts, sizes=sizes):
            return math.prod(math.comb(n, m) for n, m in zip(sizes, counts, strict=True))

        most = max(map(ways, allocations(sizes, total)))
        best = [counts for counts in allocations(sizes, total) if ways(counts) == most]
        assert all(close_rates(sizes, counts) for counts in best)


def test_a_rate_for_all_layers_keeps_the_rates_close_too():
    for sizes, total in cases(100, 1):
        rate = 1 - (total + 0.5) / sum(sizes)  # whose floor is `total`
        try:
            counts = keep_counts(named(sizes), rate=rate, gamma=1.0).values()
        except InputError:  # a layer would be empty
            continue
        assert all(abs(m - (1 - rate) * n) < len(sizes) for n, m in zip(sizes, counts, strict=True))


def test_the_most_paths_are_at_equal_numbers_and_gamma_0_finds_them():
    """Theorem 5.2: at the max of prod m_i each m_j is n_j or at least m_k - 1 for all k."""
    for sizes, total in cases(100, 2):
        most = max(map(math.prod, allocations(sizes, total)))
        for counts in allocations(sizes, total):
            if math.prod(counts) == most:
                assert all(m == n or m >= max(counts) - 1 for n, m in zip(sizes, counts, strict=True))
        rate = 1 - (total + 0.5) / sum(sizes)  # whose floor is `total`
        kept = keep_counts(named(sizes), rate=rate, gamma=0.0).values()
        assert sum(kept) == total
        assert math.prod(kept) == most


@pytest.mark.parametrize(
    ("gamma", "first", "middle", "largest", "last"),
    [
        (0.0, 1728, 5880, 5880, 5120),
        (0.1, 1728, 4831, 7323, 3965),
        (0.5, 390, 1805, 14442, 672),
        (1.0, 17, 368, 23592, 51),
    ],
)
def test_the_published_network_keeps_the_published_numbers(gamma, first, middle, largest, last):
    """RN34 for CIFAR-10. Rounding is carried from layer to layer, so the largest ones differ by at most 4 weights."""
    with torch.device("meta"):
        model = make_model("rn34")
    layers = {name: m.weight.numel() for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    counts = keep_counts(layers, rate=0.99, gamma=gamma)
    assert sum(layers.values()) == 21_265_088
    assert sum(counts.values()) == 212_650
    assert all(counts[name] <= size for name, size in layers.items())
    by_size = {size: {counts[name] for name in layers if layers[name] == size} for size in layers.values()}
    assert (by_size[1728], by_size[5120], by_size[36864]) == ({first}, {last}, {middle})
    assert all(0 <= count - largest <= 4 for count in by_size[512 * 512 * 9])


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 0.9])
def test_totals_are_exact_and_no_layer_gets_more_than_it_has(gamma, rate):
    sizes = {"a": 30, "b": 1000, "c": 470, "d": 5000}
    counts = keep_counts(sizes, rate=rate, gamma=gamma)
    assert list(counts) == list(sizes)
    assert sum(counts.values()) == round((1 - rate) * 6500)
    assert all(0 < counts[name] <= sizes[name] for name in sizes)


def test_what_rounding_leaves_goes_to_the_largest_layer():
    """5 weights in shares of 3^0.5 and 7^0.5 are 1.98 and 3.02."""
    assert keep_counts({"small": 3, "large": 7}, rate=0.5, gamma=0.5) == {"small": 1, "large": 4}


def test_a_cap_leaves_no_layer_whole():
    sizes = {"small": 10, "large": 1000}
    assert keep_counts(sizes, rate=0.5, gamma=0.0)["small"] == 10
    capped = keep_counts(sizes, rate=0.5, gamma=0.0, cap=0.6)
    assert capped["small"] == 6
    assert sum(capped.values()) == 505
    with pytest.raises(InputError, match=r"keeps 505 weights, but cap 0\.4 leaves room for 404"):
        keep_counts(sizes, rate=0.5, cap=0.4)


def test_errors_name_the_layer_and_the_option():
    with pytest.raises(InputError, match=r"leaves no weight of layer 'small' \(10 weights\)"):
        keep_counts({"small": 10, "large": 10_000}, rate=0.99, gamma=1.0)
    for options, word in (
        ({"rate": 1.0}, "rate"),
        ({"rate": 0.5, "gamma": 1.5}, "gamma"),
        ({"rate": 0.5, "gamma": -0.1}, "gamma"),
    ):
        with pytest.raises(InputError, match=f"^{word}: expected"):
            keep_counts({"a": 10}, **options)
