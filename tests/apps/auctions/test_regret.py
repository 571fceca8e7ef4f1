"""Certified regret against a grid, strong ascent and mixed-integer programs."""

import pytest
import torch

from holdfast.apps.auctions import (
    AuctionNet,
    Outcome,
    SecondPrice,
    Support,
    best_misreports,
    certify_regret,
    draw_values,
)
from holdfast.apps.auctions.mechanism import lying_utility, utility
from holdfast.apps.auctions.regret_milp import milp_regret
from holdfast.apps.auctions.utility_bound import clip_line
from holdfast.errors import InputError, SoundnessError, UnsupportedError


def network(bidders: int, items: int, payment: str = "share", *, scale: float = 2.0, seed: int = 0) -> AuctionNet:
    torch.manual_seed(seed)
    net = AuctionNet(bidders, items, hidden=(8, 8), payment=payment).double().eval()
    for weight in net.parameters():
        weight.data *= scale
    return net


@torch.no_grad()
def by_grid(net: AuctionNet, values: torch.Tensor, points: int) -> torch.Tensor:
    """Best gain of every bidder over a grid of bids, (B, n)."""
    axis = torch.linspace(0, 1, points, dtype=values.dtype)
    grid = torch.cartesian_prod(*[axis] * net.items).view(-1, net.items)
    honest = utility(net(values), values)
    gains = torch.empty_like(honest)
    for b in range(len(values)):
        for i in range(net.bidders):
            tiled = values[b : b + 1].expand(len(grid), -1, -1)
            gains[b, i] = lying_utility(net, tiled, torch.full((len(grid),), i), grid).max() - honest[b, i]
    return gains


@pytest.mark.parametrize("payment", ["share", "direct"])
@pytest.mark.parametrize(("bidders", "items"), [(1, 2), (2, 2), (3, 1), (2, 3)])
def test_regret_encloses_the_best_lie_of_a_grid(bidders, items, payment):
    net = network(bidders, items, payment, seed=bidders)
    values = draw_values(3, bidders, items, seed=2).double()
    regret = certify_regret(net, values, tolerance=2e-3)
    gains = by_grid(net, values, 41 if items == 3 else 201)
    assert bool((gains <= regret.proved).all())
    assert bool((regret.found <= regret.proved).all())
    assert float((regret.proved - regret.found).max()) <= 2e-3 + 1e-9
    assert bool((regret.found >= gains - 0.03).all())


def test_found_lies_gain_what_is_said():
    net, values = network(2, 2), draw_values(4, 2, 2).double()
    regret = certify_regret(net, values)
    honest = utility(net(values), values)
    for i in range(2):
        gained = lying_utility(net, values, torch.full((4,), i), regret.bids[:, i]) - honest[:, i]
        torch.testing.assert_close(gained.detach(), regret.found[:, i])


@pytest.mark.parametrize(("bidders", "items"), [(1, 2), (2, 2)])
def test_programs_and_branch_and_bound_agree(bidders, items):
    net, values = network(bidders, items, "direct", seed=3), draw_values(2, bidders, items).double()
    exact, found = milp_regret(net, values), certify_regret(net, values, tolerance=2e-6)
    torch.testing.assert_close(exact.found, found.found, atol=1e-5, rtol=0)
    torch.testing.assert_close(exact.found, found.proved, atol=1e-5, rtol=0)
    assert bool((exact.proved >= found.found).all())


@torch.no_grad()
def test_program_encodes_payments_beyond_the_clip():
    net, values = network(1, 2, "direct", scale=6.0, seed=1), draw_values(3, 1, 2).double()
    assert float(net.scores(values.flatten(1))[:, -1].abs().max()) > 2
    exact, found = milp_regret(net, values), certify_regret(net, values, tolerance=1e-5)
    torch.testing.assert_close(exact.proved, found.proved, atol=3e-5, rtol=0)


def test_no_misreport_by_strong_ascent_beats_the_proof_in_single_precision():
    net = network(2, 2).float()
    values = draw_values(8, 2, 2, seed=5)
    regret = certify_regret(net, values, tolerance=1e-3)
    _, gains = best_misreports(net, values, steps=50, step_size=0.05, starts=5)
    assert bool((gains <= regret.proved).all())


def test_more_steps_never_find_less():
    net, values = network(1, 2), draw_values(10, 1, 2).double()
    few, many = (best_misreports(net, values, steps=s, step_size=0.5)[1] for s in (5, 25))
    assert bool((many >= few).all() and (few >= 0).all())
    bids, _ = best_misreports(net, values, steps=25, step_size=50.0, starts=3)
    assert bool((bids >= 0).all() and (bids <= 1).all())


def test_a_smaller_tolerance_only_lowers_the_upper_end():
    net, values = network(2, 2), draw_values(3, 2, 2).double()
    loose, fair, tight = (certify_regret(net, values, tolerance=t) for t in (0.1, 0.01, 0.001))
    assert bool((tight.proved <= fair.proved).all() and (fair.proved <= loose.proved).all())
    assert loose.boxes < fair.boxes < tight.boxes


def test_ascent_climbs():
    class PaysHalfOfTheBids(SecondPrice):
        """Everybody gets half of everything for half of the bids: bidding nothing gains half of the values."""

        def __call__(self, bids):
            return Outcome(torch.full_like(bids, 0.5) + 0 * bids, 0.5 * bids.sum(-1))

    values = draw_values(4, 1, 2)
    bids, gains = best_misreports(PaysHalfOfTheBids(1, 2), values, steps=120)
    assert float(bids.max()) == 0
    torch.testing.assert_close(gains, 0.5 * values.double().sum(-1))


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_slack_covers_what_rounding_does_after_the_scores(scale):
    torch.manual_seed(0)
    net, bids = AuctionNet(2, 3, hidden=(4,)), draw_values(4000, 2, 3)
    scores = scale * torch.randn(4000, 11)
    utilities = []
    for dtype in (torch.float32, torch.float64):
        who, pay = net.split(scores.to(dtype))
        shares = net.allocate(who)[..., :-1].transpose(1, 2)
        paid = net.share(pay) * (shares * bids.to(dtype)).sum(-1)
        utilities.append(utility(Outcome(shares, paid), bids))
    slack = net._slack(scores.abs().double(), torch.float32)
    assert bool(((utilities[0] - utilities[1]).abs().amax(1) <= slack).all())
    values, liar = draw_values(5, 2, 3), torch.zeros(5, dtype=torch.long)
    box = torch.zeros(5, 3), torch.ones(5, 3)
    before, more = net.utility_above(values, liar, *box), net._slack
    net._slack = lambda size, dtype: more(size, dtype) + 1
    torch.testing.assert_close(net.utility_above(values, liar, *box), before + 1)


def test_time_that_is_up_leaves_a_sound_upper_end():
    net, values = network(2, 2), draw_values(5, 2, 2).double()
    short, full = certify_regret(net, values, timeout=1e-9), certify_regret(net, values)
    assert short.boxes < full.boxes
    assert bool((short.proved >= full.found).all())


def test_a_proof_that_a_lie_contradicts_is_refused():
    class Careless(AuctionNet):
        """Forgets a hundredth of every utility."""

        def utility_above(self, values, bidder, lower, upper):
            return super().utility_above(values, bidder, lower, upper) - 0.01

    torch.manual_seed(0)
    net = Careless(1, 2, hidden=(8,)).double().eval()
    with pytest.raises(SoundnessError, match="Careless"):
        certify_regret(net, draw_values(5, 1, 2).double(), tolerance=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("payment", ["share", "direct"])
@pytest.mark.parametrize("scale", [1.0, 10.0, 1000.0])
def test_bound_at_a_point_covers_single_and_double_precision(payment, scale):
    torch.manual_seed(1)
    net = AuctionNet(2, 2, hidden=(16, 16), payment=payment).eval()
    net.scores[-1].weight.data *= scale
    net.scores[-1].bias.data *= scale
    values = draw_values(300, 2, 2, seed=4)
    for i in range(2):
        liar, lies = torch.full((300,), i), draw_values(300, 1, 2, seed=9)[:, 0]
        above = net.float().utility_above(values, liar, lies, lies)
        whole = lying_utility(net, values, liar, lies)
        parts = torch.cat([lying_utility(net, v[None], liar[:1], b[None]) for v, b in zip(values, lies, strict=True)])
        exact = lying_utility(net.double(), values.double(), liar, lies.double())
        assert bool((above >= torch.stack([whole, parts, exact])).all())
        # not by much: the slack follows the size of the scores
        assert float((above - exact).max()) < 2e-3 * scale


def test_other_supports_and_boxes_that_cannot_be_cut_any_more():
    support = Support(1000.0, 1001.0)  # neighbouring bids are 6e-5 apart in single precision
    torch.manual_seed(0)
    net, values = AuctionNet(1, 1, hidden=(4,), support=support).eval(), draw_values(2, 1, 1, support=support)
    regret = certify_regret(net, values, tolerance=1e-9)  # ends, although the tolerance is out of reach
    bids = torch.linspace(1000, 1001, 500)[:, None]
    for profile, proved in zip(values, regret.proved, strict=True):
        tiled = profile.expand(500, 1, 1)
        gains = lying_utility(net, tiled, torch.zeros(500, dtype=torch.long), bids) - utility(net(tiled), tiled)[:, 0]
        assert float(gains.detach().max()) <= float(proved)


def test_networks_whose_outcome_is_not_what_the_bounds_speak_of_are_refused():
    class Generous(AuctionNet):
        """Halves all payments, and leaves the bounds as they are."""

        def share(self, pay):
            return super().share(pay) / 2

    with pytest.raises(UnsupportedError, match=r"share\(\) of its own"):
        certify_regret(Generous(1, 2, hidden=(4,)).eval(), draw_values(1, 1, 2))
    hooked = AuctionNet(1, 2, hidden=(4,)).eval()
    hooked.register_forward_hook(lambda module, inputs, outcome: Outcome(outcome.allocation, outcome.payment / 2))
    with pytest.raises(UnsupportedError, match="forward hook"):
        certify_regret(hooked, draw_values(1, 1, 2))

    class Free(AuctionNet):
        """Charges nothing, which the program does not know."""

        def forward(self, bids):
            return Outcome(super().forward(bids).allocation, torch.zeros(bids.shape[:2]))

    with pytest.raises(UnsupportedError, match=r"forward\(\) of its own"):
        milp_regret(Free(1, 2, hidden=(4,), payment="direct").eval(), draw_values(1, 1, 2))
    with pytest.raises(InputError, match="training mode"):
        milp_regret(AuctionNet(1, 2, hidden=(4,), payment="direct").train(), draw_values(1, 1, 2))


def test_values_of_another_precision_are_refused():
    with pytest.raises(InputError, match="values must be float64"):
        certify_regret(network(1, 2), draw_values(1, 1, 2))
    with pytest.raises(InputError, match="values must lie in the support"):
        best_misreports(network(1, 2), 2 + draw_values(1, 1, 2).double())


def test_mechanisms_with_a_product_have_no_program():
    with pytest.raises(UnsupportedError, match="bilinear"):
        milp_regret(network(1, 2), draw_values(1, 1, 2).double())


def test_line_below_a_clipped_score():
    low = 6 * torch.rand(200, dtype=torch.float64) - 4
    high = low + 5 * torch.rand(200, dtype=torch.float64)
    slope, shift = clip_line(low, high, 1.5)
    q = low + torch.linspace(0, 1, 101, dtype=torch.float64)[:, None] * (high - low)
    assert bool((slope * q + shift <= q.clamp(0, 1.5) + 1e-12).all())
