"""Certified regret: how much a bidder can gain by lying, between what was found and what is proved.

For true values v, the regret of bidder i is max over its bids b_i of u_i(b_i, v_-i), minus u_i(v). Branch and bound
over the box of its bids encloses that maximum: a box whose upper bound does not exceed the best lie by more than
the tolerance is done, every other one is cut in two. All profiles, bidders and boxes go through the bounds together.
A lie that gains more than the proof allows is a bug in Holdfast: it stops, loudly.
"""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.apps.auctions.auction_net import AuctionNet
from holdfast.apps.auctions.mechanism import Mechanism, check_bids, check_outcome, lying_utility, utility
from holdfast.apps.auctions.misreport import best_misreports, tile
from holdfast.bounding.graph.agreement import check_plain
from holdfast.bounding.graph.once import trace_once
from holdfast.errors import InputError, SoundnessError, UnsupportedError
from holdfast.utils.clock import now
from holdfast.utils.options import Count, Positive

SLACK = 1e-12
"""Relative slack of sums in float64."""
FINEST = 2**-18
"""Boxes with sides below this part of the support are not cut again: rounding is all that is left of their gap."""

DECIDES, BOUND = ("forward", "split", "allocate", "share"), "utility_above"
"""Methods of a network that decide its outcome, and the one that bounds it."""


@dataclass(frozen=True, eq=False)
class Regret:
    """What lying gains, for every profile and bidder, over the truthful utility that the mechanism gave here.

    Attributes:
        found: gain of the best lie that was found, (B, n) float64.
        proved: no lie gains more, however the mechanism is rounded when it meets the lie, (B, n) float64.
        bids: the best lie of each bidder, (B, n, k).
        boxes: how many boxes of bids were bounded, in all.
        seconds: CPU time.
    """

    found: Tensor
    proved: Tensor
    bids: Tensor
    boxes: int
    seconds: float


@dataclass(eq=False)
class _Search:
    """Open boxes of bids and what is known of each problem (a profile and a bidder)."""

    values: Tensor
    bidder: Tensor
    best: Tensor
    bids: Tensor
    done: Tensor
    """The largest upper bound of a box that was laid aside, (P,)."""
    problem: Tensor
    lower: Tensor
    upper: Tensor
    bound: Tensor
    boxes: int = 0


@torch.no_grad()
def certify_regret(
    mechanism: Mechanism,
    values: Tensor,
    *,
    tolerance: Positive = 1e-3,
    timeout: Positive = math.inf,
    chunk: Count = 2048,
) -> Regret:
    """Enclose the regret of every bidder in every profile.

    Args:
        mechanism: any with bounds of its utilities; a learned one in evaluation mode.
        values: true values, (B, n, k).
        tolerance: stop at upper ends within this distance of the best lie.
        timeout: seconds for all profiles together; what is open then keeps the upper end that is proved so far.
        chunk: boxes that are bounded at a time.

    Raises:
        SoundnessError: a lie was found that gains more than was proved.
    """
    if isinstance(mechanism, nn.Module):
        check_network(mechanism)
    check_bids(mechanism, values, "values")
    begin, end = time.process_time(), now() + timeout
    honest = utility(check_outcome(mechanism, values), values).flatten()
    with trace_once(mechanism.scores if isinstance(mechanism, AuctionNet) else nn.Identity()):
        search = _begin(mechanism, values, honest, chunk)
        while len(search.problem) and now() < end:
            _advance(mechanism, search, tolerance, chunk)
    upper = search.done.scatter_reduce(0, search.problem, search.bound, "amax")
    _check_sound(search.best, upper, mechanism)
    proved = upper - honest
    slack = SLACK * (proved.abs() + mechanism.items * mechanism.support.high)
    return Regret(
        (search.best - honest).view(values.shape[:2]),
        (proved + slack).clamp(min=0).view(values.shape[:2]),
        search.bids.view_as(values),
        search.boxes,
        time.process_time() - begin,
    )


def check_network(mechanism: nn.Module) -> None:
    """Refuse a network whose outcome is not what its bounds speak of."""
    if mechanism.training:
        raise InputError("the mechanism is in training mode, in which payments are not clipped; call .eval() first")
    check_plain(mechanism)
    owner = {n: next((c for c in type(mechanism).__mro__ if n in vars(c)), nn.Module) for n in (*DECIDES, BOUND)}
    for name in DECIDES:
        if not issubclass(owner[BOUND], owner[name]):
            raise UnsupportedError(
                f"{type(mechanism).__name__} has a {name}() of its own, but the {BOUND}() of {owner[BOUND].__name__}, "
                "which bounds another mechanism; write both"
            )


def _check_sound(found: Tensor, proved: Tensor, mechanism: Mechanism) -> None:
    """Refuse a proof that a lie contradicts, also one that is no number."""
    wrong = ~(found <= proved + SLACK * mechanism.items * mechanism.support.high)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        profile, bidder = divmod(i, mechanism.bidders)
        raise SoundnessError(
            f"bidder {bidder} of profile {profile} reaches a utility of {float(found[i]):.9g} by a lie, and at most "
            f"{float(proved[i]):.9g} is proved. This is a bug in the bounds of {type(mechanism).__name__}: please "
            "report it with the mechanism."
        )


def _numbers(bound: Tensor, mechanism: Mechanism) -> Tensor:
    """Refuse bounds that are no numbers: boxes with them would be cut for ever."""
    if bool(bound.isnan().any()):
        raise SoundnessError(f"the bounds of {type(mechanism).__name__} are no numbers; are its weights too large?")
    return bound


def _begin(mechanism: Mechanism, values: Tensor, honest: Tensor, chunk: int) -> _Search:
    """One box a problem, the whole support; gradient ascent gives a learned mechanism its best lies so far."""
    tiled, bidder = tile(values)
    best, bids = honest, tiled[torch.arange(len(tiled), device=values.device), bidder]
    if isinstance(mechanism, nn.Module):
        with torch.enable_grad():
            lies, gains = best_misreports(mechanism, values, starts=4)
        best, bids = honest + gains.flatten(), lies.flatten(0, 1)
    low = torch.full_like(bids, mechanism.support.low)
    high = torch.full_like(bids, mechanism.support.high)
    parts = zip(*(t.split(chunk) for t in (tiled, bidder, low, high)), strict=True)
    bound = _numbers(torch.cat([mechanism.utility_above(*part) for part in parts]), mechanism)
    problem = torch.arange(len(tiled), device=values.device)
    return _Search(tiled, bidder, best, bids, torch.full_like(best, -math.inf), problem, low, high, bound, len(tiled))


def _advance(mechanism: Mechanism, s: _Search, tolerance: float, chunk: int) -> None:
    """Lay boxes aside that are done, cut the worst of the others along their longest side, and bound the halves."""
    finest = max((mechanism.support.high - mechanism.support.low) * FINEST, _spacing(mechanism, s.lower.dtype))
    over = (s.bound <= s.best[s.problem] + tolerance) | ((s.upper - s.lower).amax(1) <= finest)
    s.done = s.done.scatter_reduce(0, s.problem[over], s.bound[over], "amax")
    order = (s.bound - s.best[s.problem])[~over].argsort(descending=True)
    s.problem, s.lower, s.upper, s.bound = (t[~over][order] for t in (s.problem, s.lower, s.upper, s.bound))
    taken, rest = slice(0, chunk // 2), slice(chunk // 2, None)
    problem, lower, upper = s.problem[taken], s.lower[taken], s.upper[taken]
    if not len(problem):
        return
    at = (upper - lower).argmax(1, keepdim=True)
    middle = (lower + (upper - lower) / 2).gather(1, at)
    halves = torch.cat([lower, lower.scatter(1, at, middle)]), torch.cat([upper.scatter(1, at, middle), upper])
    twice = problem.repeat(2)
    values, bidder = s.values[twice], s.bidder[twice]
    parent = s.bound[taken].repeat(2)
    bound = torch.minimum(_numbers(mechanism.utility_above(values, bidder, *halves), mechanism), parent)
    s.boxes += len(twice)
    _try(mechanism, s, twice, halves[0] + (halves[1] - halves[0]) / 2)
    s.problem, s.bound = torch.cat([twice, s.problem[rest]]), torch.cat([bound, s.bound[rest]])
    s.lower, s.upper = torch.cat([halves[0], s.lower[rest]]), torch.cat([halves[1], s.upper[rest]])


def _spacing(mechanism: Mechanism, dtype: torch.dtype) -> float:
    """Twice the distance of neighbouring bids at the upper end of the support: a wider box has a middle of its own."""
    return 2 * mechanism.support.high * torch.finfo(dtype).eps


def _try(mechanism: Mechanism, s: _Search, problem: Tensor, bids: Tensor) -> None:
    """Take bids (M, k) that beat the best lie of their problem."""
    got = lying_utility(mechanism, s.values[problem], s.bidder[problem], bids)
    top = s.best.scatter_reduce(0, problem, got, "amax")
    new = (got == top[problem]) & (got > s.best[problem])
    s.bids[problem[new]] = bids[new].to(s.bids)
    s.best = top
