"""What an auction is: bids in, allocation and payments out, and what a bidder gains by lying.

There are n bidders and k items. Bidder i values item j at v_ij and reports a bid b_ij; a mechanism answers with the
share a_ij of each item that the bidder gets and a payment p_i. Values are additive: u_i = sum_j a_ij v_ij - p_i.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from holdfast.errors import InputError


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a mechanism decides: `allocation` (B, n, k) with columns that sum to at most 1, and `payment` (B, n)."""

    allocation: Tensor
    payment: Tensor


@dataclass(frozen=True)
class Support:
    """The interval that every value and every bid lies in."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise InputError(
                f"the support of the values is unbounded, [{self.low}, {self.high}]: no regret can be proved over it. "
                "Give a finite interval that holds all values"
            )
        if not 0 <= self.low < self.high:
            raise InputError(f"the support needs 0 <= low < high, got [{self.low}, {self.high}]")

    def check(self, values: Tensor, what: str = "values") -> None:
        """Refuse values or bids outside the interval, with the place of the first one."""
        outside = ~((values >= self.low) & (values <= self.high))
        if bool(outside.any()):
            at = tuple(outside.nonzero()[0].tolist())
            raise InputError(
                f"{what} must lie in the support [{self.low:g}, {self.high:g}], got {float(values[at]):g} at {at} of "
                "(profile, bidder, item); change the values or the support"
            )


UNIT = Support()
FRESH = 1 << 31
"""Batches of a training are drawn with seeds below this one, which is half of what the generator can tell apart."""


class Mechanism(Protocol):
    """A mechanism for `bidders` and `items` whose values lie in `support`."""

    @property
    def bidders(self) -> int:
        """How many bidders there are."""

    @property
    def items(self) -> int:
        """How many items there are."""

    @property
    def support(self) -> Support:
        """The interval of values and bids."""

    @property
    def rational(self) -> bool:
        """Whether no bidder can ever pay more than its bids say that its shares are worth."""

    def __call__(self, bids: Tensor) -> Outcome:
        """Decide for bids (B, n, k)."""

    def utility_above(self, values: Tensor, bidder: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        """At least what the bidder gets with any bid in a box, (B,) float64; the others bid their values.

        Args:
            values: (B, n, k).  bidder: which one lies, (B,).
            lower: ends of the box of its bids, (B, k).  upper: the same.
        """


def check_sizes(bidders: int, items: int) -> None:
    """Refuse an auction without bidders or items."""
    if bidders < 1 or items < 1:
        raise InputError(f"an auction needs at least one bidder and one item, got {bidders} and {items}")


def check_bids(mechanism: Mechanism, bids: Tensor, what: str = "bids") -> None:
    """Refuse bids of the wrong shape or dtype, or outside the support."""
    n, k = mechanism.bidders, mechanism.items
    if bids.ndim != 3 or bids.shape[1:] != (n, k) or not len(bids):
        raise InputError(f"{what} must have shape (profiles, {n}, {k}), got {tuple(bids.shape)}")
    kinds = {p.dtype for p in mechanism.parameters()} if isinstance(mechanism, nn.Module) else set()
    if not bids.is_floating_point() or kinds - {bids.dtype}:
        kind = str(next(iter(kinds), torch.get_default_dtype())).removeprefix("torch.")
        raise InputError(f"{what} must be {kind} for this mechanism, got {bids.dtype}; convert one of them")
    mechanism.support.check(bids, what)


def check_outcome(mechanism: Mechanism, bids: Tensor) -> Outcome:
    """The outcome for bids, refused if it is none: an item that is given away twice, a payment that is no number."""
    check_bids(mechanism, bids)
    outcome = mechanism(bids)
    a, p = outcome.allocation, outcome.payment
    slack = 64 * torch.finfo(a.dtype).eps
    if a.shape != bids.shape or p.shape != bids.shape[:2]:
        raise InputError(
            f"a mechanism must answer with an allocation {tuple(bids.shape)} and payments {tuple(bids.shape[:2])}, "
            f"got {tuple(a.shape)} and {tuple(p.shape)}"
        )
    if not bool((a >= -slack).all() and (a.sum(1) <= 1 + slack).all()):
        worst = float(a.sum(1).max())
        raise InputError(
            f"the mechanism gives away more than there is: the shares of an item add up to {worst:g} (at most 1), or "
            f"one is negative (the smallest is {float(a.min()):g})"
        )
    if not bool(p.isfinite().all()):
        at = tuple((~p.isfinite()).nonzero()[0].tolist())
        raise InputError(f"the mechanism asks for a payment of {float(p[at]):g} at {at} of (profile, bidder)")
    return outcome


def utility(outcome: Outcome, values: Tensor) -> Tensor:
    """u_i = sum_j a_ij v_ij - p_i in float64, (B, n)."""
    return (outcome.allocation.double() * values.double()).sum(-1) - outcome.payment.double()


def with_bids(values: Tensor, bidder: Tensor, bids: Tensor) -> Tensor:
    """Profiles (B, n, k) in which one bidder (B,) reports `bids` (B, k) and all others their values."""
    profiles = values.clone()
    profiles[torch.arange(len(values), device=values.device), bidder] = bids.to(values)
    return profiles


def lying_utility(mechanism: Mechanism, values: Tensor, bidder: Tensor, bids: Tensor) -> Tensor:
    """What one bidder (B,) gets with `bids` (B, k) while all others report their values, (B,) float64."""
    got = utility(mechanism(with_bids(values, bidder, bids)), values)
    return got.gather(1, bidder[:, None])[:, 0]


def violation(outcome: Outcome, bids: Tensor) -> Tensor:
    """What a bidder pays beyond the value of what it gets, max(p_i - sum_j a_ij b_ij, 0), (B, n) float64."""
    return (-utility(outcome, bids)).clamp(min=0)


def draw_values(count: int, bidders: int, items: int, *, support: Support = UNIT, seed: int = 0) -> Tensor:
    """Profiles (count, n, k) of independent values, uniform on the support.

    A training draws its batches with small seeds; `FRESH` plus a small number gives profiles that none has seen.
    """
    check_sizes(bidders, items)
    if count < 1:
        raise InputError(f"count: expected an integer >= 1, got {count}")
    generator = torch.Generator().manual_seed(seed)
    return support.low + (support.high - support.low) * torch.rand(count, bidders, items, generator=generator)
