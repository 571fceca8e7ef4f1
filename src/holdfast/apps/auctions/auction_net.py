"""Auctions that are learned: a shared trunk, scores of who gets each item, and payments."""

import itertools
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from holdfast.apps.auctions.mechanism import UNIT, Outcome, Support, check_sizes, with_bids
from holdfast.apps.auctions.sparsemax import sparsemax, sparsemax_bounds, sparsemax_error
from holdfast.apps.auctions.utility_bound import clip_line, direct_rows, line_error, maximum, share_planes, share_rows
from holdfast.bounding.core.region import Region
from holdfast.bounding.core.rounding import gamma
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.errors import InputError, UnsupportedError

Payment = Literal["share", "direct"]


class AuctionNet(nn.Module):
    """A mechanism that can be certified: sparsemax allocation, piecewise-linear payments.

    A trunk of ReLU layers reads all bids. One linear layer gives scores for n bidders and a dummy who stands for "not
    sold", for every item, and one payment score t_i for every bidder. The allocation is sparsemax over the n + 1
    scores of an item. Payments are, by `payment`:

    - "share": clip(t_i / 10 + 1/2, 0, 1) of the value of the bidder's own bids, sum_j a_ij b_ij. No bidder pays more
      than its bids: individually rational by architecture.
    - "direct": t_i, clipped to [0, k high] in evaluation mode. Rationality has to be learned, by a penalty.

    Curry et al., Certifying strategyproof auction networks, 2020.

    Args:
        bidders: n.  items: k.
        hidden: widths of the trunk's layers.
        payment: how payments are computed.
        support: interval of values and bids.
    """

    def __init__(
        self,
        bidders: int,
        items: int,
        *,
        hidden: tuple[int, ...] = (128, 128),
        payment: Payment = "share",
        support: Support = UNIT,
    ) -> None:
        super().__init__()
        check_sizes(bidders, items)
        if payment not in get_args(Payment):
            raise InputError(f"payment: expected 'share' or 'direct', got {payment!r}")
        self.bidders, self.items, self.payment, self.support = bidders, items, payment, support
        sizes = (bidders * items, *hidden)
        layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.scores = nn.Sequential(*layers, nn.Linear(sizes[-1], (bidders + 1) * items + bidders))

    @property
    def rational(self) -> bool:
        """True if payments are a share of the bids."""
        return self.payment == "share"

    def forward(self, bids: Tensor) -> Outcome:
        """Decide for bids (B, n, k)."""
        who, pay = self.split(self.scores(bids.flatten(1)))
        allocation = self.allocate(who)[..., :-1].transpose(1, 2)
        if self.payment == "share":
            return Outcome(allocation, self.share(pay) * (allocation * bids).sum(-1))
        return Outcome(allocation, pay if self.training else pay.clamp(0, self.items * self.support.high))

    def split(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, k, n + 1) of who gets each item, the dummy last, and of the payments (B, n)."""
        who, pay = scores.split([(self.bidders + 1) * self.items, self.bidders], 1)
        return who.unflatten(1, (self.items, self.bidders + 1)), pay

    def allocate(self, who: Tensor) -> Tensor:
        """Shares of each item, (B, k, n + 1)."""
        return sparsemax(who)

    def share(self, pay: Tensor) -> Tensor:
        """Share of the value of its bids that a bidder pays, (B, n): a sigmoid made of three lines."""
        return (pay / 10 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def utility_above(self, values: Tensor, bidder: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        """Upper bound of a bidder's utility over a box of its bids, (B,) float64; see `Mechanism` and utility_bound.py.

        It holds for every floating-point evaluation of the network in the dtype of `values`.
        """
        relaxed = self._relaxed(with_bids(values, bidder, lower), with_bids(values, bidder, upper))
        low, high = (ends.double() for ends in linear.output_bounds(relaxed))
        (who_low, pay_low), (who_high, pay_high) = self.split(low), self.split(high)
        rows = torch.arange(len(values), device=values.device)
        shares = sparsemax_bounds(who_low, who_high, values.dtype)
        share = shares[0][rows, :, bidder], shares[1][rows, :, bidder]
        own, bids = values[rows, bidder].double(), (lower.double(), upper.double())
        scale, middle, top = (0.1, 0.5, 1.0) if self.payment == "share" else (1.0, 0.0, self.items * self.support.high)
        score = [end[rows, bidder] * scale + middle for end in (pay_low, pay_high)]
        slope, shift = clip_line(score[0], score[1], top)
        above, below = share_planes(who_low, who_high, bidder, share[0])
        pay = (score[0].clamp(0, top)[:, None], score[1].clamp(0, top)[:, None])
        if self.payment == "share":
            gap = own - pay[0] * bids[0]
            plain = (torch.where(gap >= 0, share[1], share[0]) * gap).sum(1)
            parts = share_rows(above, below, share, pay, own, bids)
        else:
            plain, parts = (share[1] * own).sum(1) - pay[0][:, 0], direct_rows(above, own)
        size = torch.maximum(low.abs(), high.abs())
        best = maximum(relaxed, parts, bidder, (slope * scale, shift + slope * middle), size)
        return torch.minimum(best, plain) + self._slack(size, values.dtype)

    def _relaxed(self, lower: Tensor, upper: Tensor) -> linear.Relaxation:
        """The scores with CROWN's lines over a box of profiles."""
        low, high = lower.flatten(1), upper.flatten(1)
        graph = trace(self.scores, torch.full_like(low[:1], self.support.high))  # the same input each time: see once.py
        return linear.relaxation(graph, Region(low, high, low), slopes="adaptive", hidden=True, sound=True)

    def _slack(self, size: Tensor, dtype: torch.dtype) -> Tensor:
        """What rounding does after the scores, (B,): sparsemax, the payment, and the planes of the bound itself.

        A share that is off by e moves a (v - p b) by e high at most. A payment p sum_j a_j b_j of at most k high is off
        by gamma(k) of it for the sum, by 4 u for the clipped score, and by u for a clip that `dtype` does not hold.
        """
        ranks, most = self.bidders + 1, self.items * self.support.high
        largest = size[:, : ranks * self.items].amax(1)
        lines = line_error(largest, ranks, self.items, self.support.high)
        return most * (sparsemax_error(largest, ranks, dtype) + gamma(self.items + 8, dtype)) + lines


class RegretNet(AuctionNet):
    """The original network: softmax over the scores, a sigmoid share of the bids as payment. Used as a teacher.

    Dütting et al., Optimal auctions through deep learning, 2019. Softmax has no exact bounds here, so that its regret
    is only estimated; train an `AuctionNet` to certify it.
    """

    def __init__(
        self, bidders: int, items: int, *, hidden: tuple[int, ...] = (128, 128), support: Support = UNIT
    ) -> None:
        super().__init__(bidders, items, hidden=hidden, support=support)

    def allocate(self, who: Tensor) -> Tensor:
        """Shares of each item, (B, k, n + 1)."""
        return who.softmax(-1)

    def share(self, pay: Tensor) -> Tensor:
        """Share of the value of its bids that a bidder pays, (B, n)."""
        return pay.sigmoid()

    def utility_above(self, values: Tensor, bidder: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        """Refuse: softmax and sigmoid have no bounds here."""
        raise UnsupportedError("RegretNet uses softmax and sigmoid, whose regret is not certified; train an AuctionNet")
