"""Mechanisms: feasible, rational, and the classical ones with their closed forms."""

import math

import pytest
import torch

from holdfast.apps.auctions import (
    AuctionNet,
    Menu,
    Outcome,
    RegretNet,
    SecondPrice,
    Support,
    certify_regret,
    draw_values,
    grand_bundle,
    manelli_vincent,
    myerson,
    utility,
    vcg,
    violation,
)
from holdfast.apps.auctions.mechanism import check_bids, check_outcome
from holdfast.errors import InputError, SoundnessError, UnsupportedError


@pytest.mark.parametrize("net", [AuctionNet(2, 3), RegretNet(2, 3), AuctionNet(1, 2, hidden=(8,))])
@torch.no_grad()
def test_learned_auctions_are_feasible_and_rational_by_architecture(net):
    bids = draw_values(200, net.bidders, net.items)
    outcome = check_outcome(net.eval(), bids)
    assert outcome.allocation.shape == bids.shape
    assert outcome.payment.shape == bids.shape[:2]
    assert bool((outcome.allocation.sum(1) <= 1 + 1e-5).all())
    assert float(violation(outcome, bids).max()) <= 1e-6


def test_parameter_counts_are_those_of_the_published_networks():
    assert sum(p.numel() for p in AuctionNet(1, 2, hidden=(128, 128)).parameters()) == 17_541
    assert sum(p.numel() for p in AuctionNet(2, 2, hidden=(128, 128, 128)).parameters()) == 34_696


@torch.no_grad()
def test_direct_payments_are_clipped_in_evaluation_only():
    net = AuctionNet(1, 2, payment="direct", hidden=(4,))
    net.scores[-1].bias.data[-1] = 50.0
    bids = draw_values(5, 1, 2)
    assert float(net.train()(bids).payment.min()) > 10
    assert float(net.eval()(bids).payment.max()) == 2.0


@pytest.mark.parametrize(
    ("mechanism", "revenue"),
    [
        (myerson(1, 2), 0.5),
        (myerson(2, 2), 5 / 6),
        (manelli_vincent(), (12 + 2 * math.sqrt(2)) / 27),
        (grand_bundle(2), math.sqrt(2 / 3) * (1 - 1 / 3)),
        (vcg(2, 2), 2 / 3),
    ],
)
def test_classical_mechanisms_earn_their_closed_form_and_lying_gains_nothing(mechanism, revenue):
    values = draw_values(200_000, mechanism.bidders, 2, seed=1)
    paid = check_outcome(mechanism, values).payment.sum(1)
    assert float(paid.mean()) == pytest.approx(revenue, abs=4 * float(paid.std()) / math.sqrt(len(paid)))
    regret = certify_regret(mechanism, values[:300])
    assert float(regret.proved.max()) < 3e-6
    assert float(regret.found.min()) >= 0


def test_certificate_finds_the_regret_of_a_first_price_auction():
    class FirstPrice(SecondPrice):
        """Winners pay their bid, so that bidding less pays."""

        def __call__(self, bids):
            wins = super().__call__(bids).allocation
            return Outcome(wins, (wins * bids).sum(-1))

        def utility_above(self, values, bidder, lower, upper):
            rows = torch.arange(len(values))
            v, price = values[rows, bidder].double(), self._prices(values)[rows, bidder].double()
            won = v - torch.maximum(lower.double(), price)
            return torch.where(upper.double() >= price, won.clamp(min=0), 0.0).sum(1)

    values = torch.tensor([[[0.9], [0.4]]])
    regret = certify_regret(FirstPrice(2, 1), values, tolerance=1e-4)
    assert float(regret.proved[0, 0]) == pytest.approx(0.5, abs=1e-3)  # bid just above 0.4 instead of 0.9
    assert float(regret.found[0, 0]) == pytest.approx(0.5, abs=1e-3)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="at least one bidder and one item, got 0 and 2"):
        AuctionNet(0, 2)
    with pytest.raises(InputError, match="unbounded"):
        Support(0.0, math.inf)
    with pytest.raises(InputError, match="0 <= low < high"):
        Support(-1.0, 1.0)
    net = AuctionNet(1, 2, hidden=(4,)).eval()
    with pytest.raises(InputError, match=r"must lie in the support \[0, 1\], got -0.5 at \(0, 0, 1\)"):
        certify_regret(net, torch.tensor([[[0.5, -0.5]]]))
    with pytest.raises(InputError, match=r"shape \(profiles, 1, 2\), got \(3, 2, 2\)"):
        check_bids(net, torch.rand(3, 2, 2))
    with pytest.raises(InputError, match=r"training mode"):
        certify_regret(net.train(), torch.rand(1, 1, 2))
    with pytest.raises(InputError, match="add up to 2"):
        check_outcome(Menu(((2.0, 0.0),), (0.1,)), torch.ones(1, 1, 2))
    with pytest.raises(UnsupportedError, match="train an AuctionNet"):
        certify_regret(RegretNet(1, 2, hidden=(4,)).eval(), torch.rand(1, 1, 2))
    with pytest.raises(InputError, match="2 items, got 3"):
        grand_bundle(3)
    with pytest.raises(InputError, match="payment: expected 'share' or 'direct', got 'half'"):
        AuctionNet(1, 2, payment="half")
    with pytest.raises(InputError, match="expected an integer >= 1, got 0"):
        draw_values(0, 1, 2)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: vcg(0, 2), "at least one bidder"),
        (lambda: myerson(2, 0), "at least one bidder and one item, got 2 and 0"),
        (lambda: SecondPrice(2, 2, -0.5), "reserve must be a number >= 0"),
        (lambda: Menu(((1.0, 0.0), (1.0,)), (0.1, 0.2)), "one share for each item"),
        (lambda: Menu(((),), (0.1,)), "one item, got 1 and 0"),
        (lambda: grand_bundle(2, math.nan), "prices must be numbers"),
    ],
)
def test_classical_mechanisms_that_cannot_be_are_refused(build, said):
    with pytest.raises(InputError, match=said):
        build()


def test_payments_and_bounds_that_are_no_numbers_are_refused():
    class Unknown(SecondPrice):
        """Asks for no number."""

        def __call__(self, bids):
            return Outcome(torch.zeros_like(bids), torch.full(bids.shape[:2], math.nan))

    class Unbounded(SecondPrice):
        """Bounds that are no numbers."""

        def utility_above(self, values, bidder, lower, upper):
            return torch.full((len(values),), math.nan, dtype=torch.float64)

    with pytest.raises(InputError, match=r"payment of nan at \(0, 0\)"):
        certify_regret(Unknown(2, 2), draw_values(2, 2, 2))
    with pytest.raises(SoundnessError, match="no numbers"):
        certify_regret(Unbounded(2, 2), draw_values(2, 2, 2))


def test_utility_is_value_minus_payment():
    outcome = Outcome(torch.tensor([[[0.5, 1.0]]]), torch.tensor([[0.2]]))
    assert float(utility(outcome, torch.tensor([[[0.4, 0.3]]]))) == pytest.approx(0.3)
