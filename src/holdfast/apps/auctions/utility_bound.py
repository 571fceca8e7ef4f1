"""Upper bound of a bidder's utility over a box of its bids, linear in the bids: its error falls with the box squared.

For a learned mechanism u = sum_j a_j (v_j - p b_j). Over a box, every factor is replaced by a line:

- Shares. With S any set of rows, sparsemax gives z_i = max(0, x_i - tau) and tau >= (sum_S x - 1) / |S|, with equality
  for the support. So max(0, x_i - (sum_S x - 1) / |S|) bounds z_i from above; S is the support at the centre of the
  scores, and the maximum gets its chord. From below, z_i = 1 - sum of the others.
- The clipped payment score gets a line below it.
- Products get McCormick's planes (Computability of global solutions to factorable nonconvex programs, 1976), two for
  a g with g = v - p b and two for p b: four candidates, of which the least bound counts.

What is left is linear in the scores and the bids. CROWN carries it back through the network to the bids, where its
maximum over the box is known in closed form.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.apps.auctions.sparsemax import sparsemax
from holdfast.bounding.core.region import minimum
from holdfast.bounding.core.rounding import unit
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import Coefficients

Ends = tuple[Tensor, Tensor]
"""Lower and upper ends of intervals."""


@dataclass(frozen=True, eq=False)
class Plane:
    """A linear function of the scores of each item: `slope` (B, k, n + 1) and `shift` (B, k)."""

    slope: Tensor
    shift: Tensor


def share_planes(low: Tensor, high: Tensor, bidder: Tensor, least: Tensor) -> tuple[Plane, Plane]:
    """Planes above and below the liar's shares, which are at least `least`, for scores (B, k, n + 1) in [low, high]."""
    rows = torch.arange(len(bidder), device=bidder.device)
    support = (sparsemax((low + high) / 2) > 0).double()
    size = support.sum(-1)
    weight = torch.eye(low.shape[-1], dtype=low.dtype, device=low.device) - (support / size[..., None])[..., None, :]
    over, under = weight.clamp(min=0), weight.clamp(max=0)
    constant = (1 / size)[..., None]
    top = (over * high[..., None, :] + under * low[..., None, :]).sum(-1) + constant
    bottom = (over * low[..., None, :] + under * high[..., None, :]).sum(-1) + constant
    chord = torch.where(bottom >= 0, 1.0, top.clamp(min=0) / (top - bottom).clamp(min=1e-300))
    chord = torch.where(top <= 0, 0.0, chord)
    slope, shift = chord[..., None] * weight, chord * (constant - bottom.clamp(max=0))
    above = Plane(slope[rows, :, bidder], shift[rows, :, bidder])
    sold = least > 0  # a share that may be 0 gets 0 as its line
    below = Plane(
        torch.where(sold[..., None], above.slope - slope.sum(2), 0.0),
        torch.where(sold, 1 + above.shift - shift.sum(2), 0.0),
    )
    return above, below


def clip_line(low: Tensor, high: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Slope and shift of a line below q -> clip(q, 0, top) for q in [low, high]."""
    wide = (high - low).clamp(min=1e-300)
    chord = (high.clamp(0, top) - low.clamp(0, top)) / wide
    convex = (high > -low).to(low.dtype)  # below max(q, 0): q itself or 0
    both = top / high.clamp(min=top)  # through the origin and the upper corner
    slope = torch.where(low >= 0, chord, torch.where(high <= top, convex, both))
    return slope, torch.where(low >= 0, low.clamp(0, top) - chord * low, 0.0)


@dataclass(frozen=True, eq=False)
class Rows:
    """M functions that are linear in the scores, the liar's payment p and its bids.

    Factors `who` (B, M, k, n + 1), `pay` (B, M) and `bids` (B, M, k), and `constant` (B, M).
    """

    who: Tensor
    pay: Tensor
    bids: Tensor
    constant: Tensor


def share_rows(above: Plane, below: Plane, share: Ends, pay: Ends, own: Tensor, bids: Ends) -> Rows:
    """Four functions above sum_j a_j (v_j - p b_j), from intervals of a (B, k), p (B, 1) and b (B, k), and values v.

    With g = v - p b: a g <= G a + A g - A G for (A, G) = (least a, largest g) and (largest a, least g), and
    p b >= P b + B p - P B at both ends (P, B).
    """
    ends = []
    for a, g in ((share[0], own - pay[0] * bids[0]), (share[1], own - pay[1] * bids[1])):
        gains = g >= 0
        who = torch.where(gains[..., None], above.slope, below.slope) * g[..., None]
        line = torch.where(gains, above.shift, below.shift) * g - a * g + a * own
        for p, b in ((pay[0], bids[0]), (pay[1], bids[1])):
            ends.append((who, -(a * b).sum(1), -a * p, (line + a * p * b).sum(1)))
    return Rows(*(torch.stack(part, 1) for part in zip(*ends, strict=True)))


def direct_rows(above: Plane, own: Tensor) -> Rows:
    """One function above sum_j a_j v_j - p, for values that are not negative."""
    who, constant = above.slope * own[..., None], (above.shift * own).sum(1)
    return Rows(who[:, None], -torch.ones_like(constant)[:, None], torch.zeros_like(own)[:, None], constant[:, None])


def maximum(
    relaxed: linear.Relaxation, rows: Rows, bidder: Tensor, pay_line: tuple[Tensor, Tensor], size: Tensor
) -> Tensor:
    """The least of the maxima of the rows over the region of the relaxed network, (B,) float64.

    Args:
        relaxed: the network from bids (B, n k) to scores.
        rows: what is bounded; p stands for a line below it.
        bidder: the liar, (B,).
        pay_line: slope and shift (B,) of that line, a function of the liar's payment score.
        size: largest absolute scores, (B, scores): for the rounding of the rows.
    """
    batch, count, items, ranks = rows.who.shape
    bidders, index = ranks - 1, torch.arange(batch, device=bidder.device)
    start = torch.zeros(batch, count, items * ranks + bidders, dtype=torch.float64, device=bidder.device)
    start[..., : items * ranks] = rows.who.flatten(2)
    start[index, :, items * ranks + bidder] = rows.pay * pay_line[0][:, None]
    constant = rows.constant + rows.pay * pay_line[1][:, None]
    dtype = relaxed.region.x.dtype
    planes = linear.backward(relaxed, len(relaxed.graph.nodes) - 1, Coefficients(-start.to(dtype)))
    values = planes.coefficients.values.unflatten(2, (bidders, items)).clone()
    values[index, :, bidder] -= rows.bids.to(dtype)
    least = (minimum(relaxed.region, Coefficients(values.flatten(2)), sound=True) + planes.shift).double()
    edge = relaxed.region.upper.abs().unflatten(1, (bidders, items))[index, bidder].double()
    terms = (start.abs() * size[:, None]).sum(2) + (rows.bids.abs() * edge[:, None]).sum(2) + constant.abs()
    reach = terms + least.abs() + planes.shift.double().abs()
    reach = reach + values.double().abs().flatten(2).sum(2) * edge.amax(1, keepdim=True)
    above: Tensor = constant - least + 64 * (items + 4) * unit(dtype) * (reach + 1)
    return above.amin(1)


def line_error(size: Tensor, ranks: int, items: int, high: float) -> Tensor:
    """What float64 rounding of the planes themselves can hide, for scores up to `size` (B,), `ranks` for each item.

    A plane's ends are sums of `ranks` scores, off by (ranks + 4) u (1 + 2 m) each; the plane below a share adds up
    `ranks` of them. Slopes that cancel in that sum leave the same error. A utility takes k shares of at most `high`.
    """
    return 16 * ranks * (ranks + 4) * unit(torch.float64) * (1 + 2 * size) * items * (high + 1)
