"""Certified training against patches: the loss of the worst margins over many placements, bounded by intervals."""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from holdfast.bounding.fast import patches as local
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace_batch
from holdfast.errors import InputError
from holdfast.registry import Objective
from holdfast.threats import Patch, Threat
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import margin_metrics
from holdfast.utils.options import NOT_NEGATIVE, Count

BOXES = 2**13
"""Boxes in memory at a time; beyond that, parts are computed again in the backward pass. The result is the same."""


@Objective(
    "patch",
    summary="interval bounds for a patch at random places, at all of them, or pooled over neighbouring ones",
    reference="Chiang et al., Certified defenses for adversarial patches, 2020",
    threats=("patch",),
    certificate="patch",
    ramps=True,
)
def patch(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    places: Annotated[int, NOT_NEGATIVE] = 10,  # random ones for each input, drawn anew in each step; 0 for all
    pool: Count = 1,  # merge the bounds of pool x pool neighbouring places after the first layer; needs `places` = 0
    pool_again: Count = 1,  # and those of pool_again x pool_again neighbours of these after the second layer
) -> tuple[Tensor, Metrics]:
    """Mean of CE(-m, y), where m_j is the least lower bound of z_y - z_j over the places of the patch.

    While the budget rises, a value under the patch moves by at most that share of the valid range. With random places
    the cost does not depend on the size of the image, but the loss bounds the worst case only at those places:
    certify with all of them. "verified" is the share of inputs with all margins above zero at the places of this step.
    """
    threat = need_patch(context.threat, x)
    if pool * pool_again > 1 and places > 0:
        raise InputError(
            f"pool: neighbouring places are merged where all are bounded, got places = {places}; set it to 0"
        )
    graph, logits = trace_batch(model, x)
    reach = context.ramp * (threat.high - threat.low)
    corners = threat.locations(tuple(x.shape[1:])).to(x.device)
    if reach == 0:
        margins = logits.gather(1, y[:, None]) - logits
    elif places > 0:
        drawn = corners[context.noise.integers(len(corners), (places,))]
        margins = place_margins(graph, x, y, threat, drawn[:, :, None], reach).amin(1)
    else:
        margins = worst_margins(
            graph, x, y, threat, corners[groups(threat, x, pool, pool_again)], reach, again=pool_again**2
        )
    return cross_entropy(-margins, y), margin_metrics(logits, margins, y)


def need_patch(threat: Threat, x: Tensor) -> Patch:
    """The threat, if it is a patch and the inputs are images."""
    if not isinstance(threat, Patch):
        raise InputError(f"threat: this objective trains against patches, such as 'patch:5x5', got '{threat}'")
    if x.ndim != 4:
        raise InputError(f"threat: '{threat}' needs images of shape (B, C, H, W), got inputs of shape {tuple(x.shape)}")
    return threat


def groups(threat: Patch, x: Tensor, pool: int, again: int = 1) -> Tensor:
    """Neighbouring places, as indices into `threat.locations`, (G, again^2 pool^2); those at the border have repeats.

    A group has again x again neighbouring blocks, one after the other, and a block pool x pool neighbouring places.
    """
    rows, columns = x.shape[2] - threat.height + 1, x.shape[3] - threat.width + 1
    block = pool * torch.arange(again)[:, None] + torch.arange(pool)
    down, across = (
        (torch.arange(0, size, pool * again)[:, None, None] + block).clamp(max=size - 1) for size in (rows, columns)
    )
    index = down[:, None, :, None, :, None] * columns + across[None, :, None, :, None, :]
    return index.flatten(2).flatten(0, 1).to(x.device)


def worst_margins(
    graph: Graph, x: Tensor, y: Tensor, threat: Patch, corners: Tensor, reach: float, *, again: int = 1
) -> Tensor:
    """The least margins over all groups of places (G, p, 2), shape (B, K).

    Each margin has its least value in one group, the only one that its gradient comes from. So all groups are searched
    without gradients, and the worst one of each class is bounded once more with them.
    """
    worst = corners[_worst_groups(graph, x, y, threat, corners, reach, again)]
    return place_margins(graph, x, y, threat, worst, reach, again=again).diagonal(dim1=1, dim2=2)


@torch.no_grad()
def _worst_groups(
    graph: Graph, x: Tensor, y: Tensor, threat: Patch, corners: Tensor, reach: float, again: int
) -> Tensor:
    """Which of the groups (G, p, 2) has the least margin of each class, (B, K)."""
    least = x.new_full((len(x), graph.nodes[-1].shape[0]), torch.inf)
    where = torch.zeros_like(least, dtype=torch.long)
    first = 0
    for part in corners.split(max(1, BOXES // (len(x) * corners.shape[1]))):
        found, at = place_margins(graph, x, y, threat, part.expand(len(x), *part.shape), reach, again=again).min(1)
        where = torch.where(found < least, first + at, where)
        least = torch.minimum(least, found)
        first += len(part)
    return where


def place_margins(
    graph: Graph, x: Tensor, y: Tensor, threat: Patch, corners: Tensor, reach: float, *, again: int = 1
) -> Tensor:
    """Lower bounds of z_y - z_j for n groups of p places of each input, corners (B, n, p, 2), shape (B, n, K)."""
    count = max(1, BOXES // (corners.shape[1] * corners.shape[2]))
    if not torch.is_grad_enabled() or len(x) <= count:
        return local.margin_bounds(graph, x, y, threat, corners, reach, again=again)

    def bounds(x: Tensor, y: Tensor, corners: Tensor) -> Tensor:
        return local.margin_bounds(graph, x, y, threat, corners, reach, again=again)

    parts = zip(x.split(count), y.split(count), corners.split(count), strict=True)
    return torch.cat([checkpoint(bounds, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
