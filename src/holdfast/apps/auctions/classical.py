"""Auctions with closed forms, by which learned ones are judged; lying never pays in any of them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.apps.auctions.mechanism import UNIT, Outcome, Support, check_sizes
from holdfast.bounding.core.rounding import unit
from holdfast.errors import InputError


@dataclass(frozen=True)
class SecondPrice:
    """Every item by itself to the highest bid above the reserve, at the second-highest bid or the reserve.

    With reserve 0 it is the auction of Vickrey, Clarke and Groves for additive values. With the reserve of Myerson's
    optimal auction, 1/2 for values uniform on [0, 1], it earns 1/4 an item from one bidder and 5/12 from two.

    Vickrey, Counterspeculation, auctions, and competitive sealed tenders, 1961; Myerson, Optimal auction design, 1981.
    """

    bidders: int
    items: int
    reserve: float = 0.0
    support: Support = UNIT
    rational: bool = True

    def __post_init__(self) -> None:
        check_sizes(self.bidders, self.items)
        if not 0 <= self.reserve < math.inf:
            raise InputError(f"the reserve must be a number >= 0, got {self.reserve:g}")

    def __call__(self, bids: Tensor) -> Outcome:
        """Decide for bids (B, n, k)."""
        wins = F.one_hot(bids.argmax(1), self.bidders).mT.to(bids) * (bids >= self.reserve)
        return Outcome(wins, (wins * self._prices(bids)).sum(-1))

    def _prices(self, bids: Tensor) -> Tensor:
        """What each bidder would pay for each item: the best bid of the others, or the reserve."""
        floor = torch.full_like(bids[:, :1], self.reserve)
        prices = [torch.cat([bids[:, :i], bids[:, i + 1 :], floor], 1).amax(1) for i in range(self.bidders)]
        return torch.stack(prices, 1)

    def utility_above(self, values: Tensor, bidder: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        """Exact but for ties: an item that can be won gives v - price, one that can be lost gives 0."""
        rows = torch.arange(len(values), device=values.device)
        price, v = self._prices(values)[rows, bidder].double(), values[rows, bidder].double()
        gain = v - price
        can_lose, can_win = lower.double() <= price, upper.double() >= price
        best = torch.where(can_win, torch.where(can_lose, gain.clamp(min=0), gain), 0.0)
        return best.sum(1) + _slack(self, values.dtype)


def vcg(bidders: int, items: int, *, support: Support = UNIT) -> SecondPrice:
    """Second-price auction of every item without a reserve."""
    return SecondPrice(bidders, items, 0.0, support)


def myerson(bidders: int, items: int, *, support: Support = UNIT) -> SecondPrice:
    """Every item by itself in the optimal auction for values uniform on the support: reserve r = high - r."""
    return SecondPrice(bidders, items, max(support.high / 2, support.low), support)


@dataclass(frozen=True)
class Menu:
    """One bidder chooses from a menu: option m gives the shares `shares[m]` of the items for `prices[m]`.

    Taking nothing for nothing is always on the menu. Reports only choose an option, so that lying cannot pay.
    """

    shares: tuple[tuple[float, ...], ...]
    prices: tuple[float, ...]
    support: Support = UNIT
    bidders: int = 1
    rational: bool = True

    def __post_init__(self) -> None:
        if self.bidders != 1:
            raise InputError(f"a menu is for one bidder, got {self.bidders}")
        if len(self.shares) != len(self.prices) or not self.shares:
            raise InputError(f"a menu needs one price for each option, got {len(self.shares)} and {len(self.prices)}")
        check_sizes(self.bidders, self.items)
        if len({len(option) for option in self.shares}) > 1:
            raise InputError("every option of a menu needs one share for each item")
        if not all(0 <= price < math.inf for price in self.prices):
            raise InputError(f"prices must be numbers >= 0, got {', '.join(f'{p:g}' for p in self.prices)}")

    @property
    def items(self) -> int:
        """How many items there are."""
        return len(self.shares[0])

    def __call__(self, bids: Tensor) -> Outcome:
        """Decide for bids (B, 1, k)."""
        shares, prices = self._options(bids)
        chosen = (bids[:, 0] @ shares.T - prices).argmax(1)
        return Outcome(shares[chosen][:, None], prices[chosen][:, None])

    def _options(self, like: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.tensor([(0.0,) * self.items, *self.shares], dtype=like.dtype, device=like.device)
        return shares, torch.tensor([0.0, *self.prices], dtype=like.dtype, device=like.device)

    def utility_above(self, values: Tensor, bidder: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        """The best of the options that some bid of the box may choose, at the true values; see `Mechanism`."""
        shares, prices = self._options(values.double())
        low, high = lower.double(), upper.double()
        # Option m is never chosen if some other option r is better everywhere: (s_r - s_m) b > price_r - price_m.
        gap = shares[None] - shares[:, None]  # (m, r, k)
        least = torch.einsum("mrk,bk->bmr", gap.clamp(min=0), low) + torch.einsum("mrk,bk->bmr", gap.clamp(max=0), high)
        excluded = (least - (prices[None] - prices[:, None]) > _slack(self, values.dtype)).any(2)
        worth = values[:, 0].double() @ shares.T - prices
        return worth.masked_fill(excluded, -torch.inf).amax(1) + _slack(self, values.dtype)


def grand_bundle(items: int, price: float | None = None) -> Menu:
    """All items together at one price, to one bidder; the best price for two uniform values is sqrt(2/3)."""
    if price is None and items != 2:
        raise InputError(f"the best price of a bundle is known here for 2 items, got {items}; give a price")
    return Menu(((1.0,) * items,), (math.sqrt(2 / 3) if price is None else price,))


def manelli_vincent() -> Menu:
    """The optimal auction of two items to one bidder with values uniform on [0, 1].

    One item costs 2/3, both cost (4 - sqrt 2) / 3; it earns (12 + 2 sqrt 2) / 27 = 0.5492 (Manelli and Vincent,
    Bundling as an optimal selling mechanism for a multiple-good monopolist, 2006).
    """
    single, both = 2 / 3, (4 - math.sqrt(2)) / 3
    return Menu(((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)), (single, single, both))


def _slack(mechanism: SecondPrice | Menu, dtype: torch.dtype) -> float:
    """What rounding of prices, shares and their sums over k items in `dtype` can add to a utility."""
    return 4 * unit(dtype) * (mechanism.items + 1) ** 2 * mechanism.support.high
