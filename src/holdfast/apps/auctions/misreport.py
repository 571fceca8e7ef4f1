"""Lies that pay: gradient ascent on a bidder's utility over its own bids."""

import torch
from torch import Tensor

from holdfast.apps.auctions.mechanism import Mechanism, check_bids, lying_utility, utility
from holdfast.utils.options import Count, Positive


def tile(values: Tensor) -> tuple[Tensor, Tensor]:
    """Every profile once for each bidder: profiles (B n, n, k) and the bidder who lies (B n,)."""
    batch, bidders = values.shape[:2]
    return values.repeat_interleave(bidders, 0), torch.arange(bidders, device=values.device).repeat(batch)


def best_misreports(
    mechanism: Mechanism,
    values: Tensor,
    *,
    steps: Count = 25,
    step_size: Positive = 0.02,
    starts: Count = 1,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """The best lies found for every bidder: bids (B, n, k) and what they gain over the truth, (B, n) float64.

    Plain gradient steps from the truthful bids, and from random bids for further starts, clipped to the support; the
    best point on the way counts, so that more steps never find less. Gains are never negative: the truth is a report.

    Args:
        mechanism: differentiable in its bids.
        values: true values, (B, n, k).
        steps: gradient steps.  step_size: length factor of a step, in parts of the support.
        starts: 1 starts at the truth, more start at random bids as well.
        seed: decides the random bids.
    """
    check_bids(mechanism, values, "values")
    tiled, bidder = tile(values)
    truth = tiled[torch.arange(len(tiled), device=values.device), bidder]
    low, high = mechanism.support.low, mechanism.support.high
    generator = torch.Generator().manual_seed(seed)
    best_bids, best = truth, utility(mechanism(values), values).flatten().detach()
    honest = best
    for start in range(starts):
        drawn = low + (high - low) * torch.rand(truth.shape, generator=generator)
        bids = truth.clone() if start == 0 else drawn.to(truth)
        for step in range(steps + 1):
            bids = bids.detach().requires_grad_(step < steps)
            with torch.set_grad_enabled(step < steps):
                gained = lying_utility(mechanism, tiled, bidder, bids)
            better = gained.detach() > best
            best = torch.where(better, gained.detach(), best)
            best_bids = torch.where(better[:, None], bids.detach(), best_bids)
            if step < steps:
                (slope,) = torch.autograd.grad(gained.sum(), bids)
                bids = (bids + step_size * (high - low) * slope).clamp(low, high)
    return best_bids.view_as(values), (best - honest).view(values.shape[:2])
