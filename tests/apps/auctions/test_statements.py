"""Figures of an auction over a sample, and the page about it."""

import math
import re

import pytest
import torch

from holdfast.apps.auctions import AuctionNet, Outcome, Regret, certify_regret, draw_values, manelli_vincent, myerson
from holdfast.apps.auctions.auction_page import auction_page, classical_for, regret_svg
from holdfast.apps.auctions.statements import describe_auction
from holdfast.errors import SoundnessError


def test_statement_counts_revenue_regret_and_violations():
    class Charges(type(myerson(1, 2))):
        """Charges everybody 0.3, whatever they get."""

        def __call__(self, bids):
            return Outcome(torch.ones_like(bids) * 0.5, torch.full(bids.shape[:2], 0.3))

    values = torch.tensor([[[0.1, 0.1]], [[0.9, 0.9]]])
    zeros = torch.zeros(2, 1, dtype=torch.float64)
    regret = Regret(zeros, zeros + torch.tensor([[0.1], [0.3]]), values, 1, 4.0)
    s = describe_auction(Charges(1, 2), values, regret, tolerance=1e-3)
    assert (s.profiles, s.seconds) == (2, 2.0)
    assert s.revenue == pytest.approx(0.3)
    assert s.revenue_kept == pytest.approx(0.15)
    assert s.violations == 0.5
    assert s.violation_largest == pytest.approx(0.2)
    assert (s.proved, s.largest) == (pytest.approx(0.2), pytest.approx(0.3))
    assert s.mean_above <= 2
    assert s.quantile_above is None


def test_statement_over_the_distribution_holds_for_what_was_proved():
    mechanism, values = manelli_vincent(), draw_values(500, 1, 2)
    proved = torch.linspace(0, 0.1, 500, dtype=torch.float64)[:, None]
    regret = Regret(torch.zeros_like(proved), proved, values, 500, 1.0)
    s = describe_auction(mechanism, values, regret, tolerance=1e-3)
    assert s.mean_above == pytest.approx(0.05 + 2 * math.sqrt(math.log(100) / 1000))
    assert s.proved < s.bernstein_above < s.mean_above
    assert s.spread == pytest.approx(0.1 / math.sqrt(12), rel=0.01)
    assert 0.09 < s.quantile_above < 0.1


def test_one_profile_says_nothing_of_the_distribution_and_direct_payments_double_the_range():
    values, zero = draw_values(1, 1, 2), torch.zeros(1, 1, dtype=torch.float64)
    regret = Regret(zero, zero, values, 1, 1.0)
    assert describe_auction(manelli_vincent(), values, regret, tolerance=1e-3).mean_above == 2.0
    net = AuctionNet(1, 2, hidden=(4,), payment="direct").eval()
    assert describe_auction(net, values, regret, tolerance=1e-3).mean_above == 4.0


def test_empirical_regret_stands_beside_the_proof_and_must_not_exceed_it():
    values, half = draw_values(2, 1, 2), torch.full((2, 1), 0.5, dtype=torch.float64)
    regret = Regret(half / 2, half, values, 1, 1.0)
    s = describe_auction(manelli_vincent(), values, regret, tolerance=1e-3, gains=half * 0.8)
    assert (s.empirical, s.ratio) == (pytest.approx(0.4), pytest.approx(0.8))
    with pytest.raises(SoundnessError, match="bug in Holdfast"):
        describe_auction(manelli_vincent(), values, regret, tolerance=1e-3, gains=half + 1e-9)


def test_histogram_has_both_ends():
    found, proved = torch.tensor([[0.0], [0.0], [0.1]]).double(), torch.tensor([[0.1], [0.1], [0.2]]).double()
    drawn = regret_svg(Regret(found, proved, draw_values(3, 1, 2), 1, 1.0))
    heights = [float(h) for h in re.findall(r'height="([0-9.]+)" fill="#0072b2"', drawn)][:-1]  # the last is the key's
    assert [round(h, 1) for h in heights if h] == [230.0, 115.0]  # two in the first bar, one in the middle
    ends = re.search(r'points="([^"]+)"', drawn).group(1).split()
    assert {y for _, y in (point.split(",") for point in ends)} == {"250.0", "135.0", "20.0"}


def test_page_says_the_figures_and_shows_pictures():
    torch.manual_seed(0)
    net, values = AuctionNet(1, 2, hidden=(8,)).eval(), draw_values(5, 1, 2)
    regret = certify_regret(net, values, tolerance=1e-2)
    s = describe_auction(net, values, regret, tolerance=1e-2)
    page = auction_page(net, values, regret, s, title="A & B")
    assert "A &amp; B" in page
    assert f"earns {s.revenue:.4f} on average" in page
    assert f"provably at most {s.proved:.4f}" in page
    assert page.count("<img") == 3
    assert "Manelli" in page
    assert [name for name, _ in classical_for(AuctionNet(2, 3))] == ["second price (VCG)", "Myerson, item by item"]
