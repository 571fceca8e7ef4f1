"""Patches: one interval pass for every place, shapes other than rectangles, and bound pooling."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.bounding import interval
from holdfast.bounding.core.placements import mixing_layer
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.core.margins import Worst, from_margins, interval_margins, worst_place
from holdfast.errors import InputError
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Patch, PatchShape, Threat
from holdfast.threats.patch_shapes import SHAPES, shape_masks
from holdfast.utils.clock import check_time
from holdfast.utils.options import Count

__all__ = ["SHAPES", "certify_shape", "mask_margins", "patch", "placements", "pooled_margins", "shape_masks"]


@Certificate(
    "patch",
    summary="intervals for every location of the patch, optionally pooled over neighbouring locations",
    threats=("patch", "patch-shape"),
    reference="Chiang et al., Certified defenses for adversarial patches, 2020",
)
def patch(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Patch | PatchShape,
    *,
    pool: Count = 1,
    pool_again: Count = 1,
    early: bool = False,
    sound: bool = True,
    chunk_boxes: Count = 1024,  # in memory at a time
) -> CertifyResult:
    """Certified if the interval bound of every margin is above zero at every location.

    Of a family of shapes every member counts. With `pool` > 1, for rectangles, the bounds of pool x pool neighbouring
    locations are merged after the first layer: looser, and up to pool^2 times faster. With `pool_again` > 1,
    pool_again x pool_again neighbours among these are merged after the second layer. With `early`, not beside pools, an
    input is given up at the first location at which its bound fails, beginning in the middle of the image; its
    margin is then minus infinity.
    """
    shape = tuple(x.shape[1:])
    places = threat.locations(shape)
    masks = threat.masks(places, shape)[:, 0]
    pooled = pool * pool_again != 1
    if early and pooled:
        raise InputError(f"'patch' takes early=True or pool={pool} and pool_again={pool_again}, not both")
    if isinstance(threat, PatchShape) and pooled:
        raise InputError(f"bounds are pooled over the places of a rectangle, got pool={pool} for the threat '{threat}'")
    graph = trace(model, x, threat)
    if not isinstance(threat, PatchShape) and pooled:
        grid = (x.shape[2] - threat.height + 1, x.shape[3] - threat.width + 1)
        margins = pooled_margins(graph, x, y, masks, grid, (pool, pool_again), threat, sound=sound)
        return from_margins(margins, y, "patch")
    run = _until_failure if early else worst_masks
    worst = run(graph, x, y, masks, threat, sound=sound, chunk=chunk_boxes)
    return from_margins(worst.margins, y, "patch", place=places.to(x.device)[worst.place, -2:])


def mask_boxes(x: Tensor, masks: Tensor, threat: Threat) -> tuple[Tensor, Tensor]:
    """Boxes in which the pixels of one mask (L, H, W) are free: lower and upper of shape (B * L, C, H, W)."""
    free = masks[None, :, None].to(x.device)
    wide = x[:, None]
    lower = torch.where(free, torch.full_like(wide, threat.low), wide)
    upper = torch.where(free, torch.full_like(wide, threat.high), wide)
    return lower.flatten(0, 1), upper.flatten(0, 1)


def mask_margins(
    graph: Graph, x: Tensor, y: Tensor, masks: Tensor, threat: Threat, *, sound: bool, chunk: int
) -> Tensor:
    """Smallest interval bound of each margin over all masks (L, H, W), shape (B, K)."""
    return worst_masks(graph, x, y, masks, threat, sound=sound, chunk=chunk).margins


def worst_masks(graph: Graph, x: Tensor, y: Tensor, masks: Tensor, threat: Threat, *, sound: bool, chunk: int) -> Worst:
    """The interval bounds of the margins over all masks (L, H, W), and which mask is the worst."""
    worst = None
    for part in masks.split(max(1, chunk // len(x))):
        lower, upper = mask_boxes(x, part, threat)
        box = Region(lower, upper, x.repeat_interleave(len(part), 0))
        margins = interval_margins(graph, box, y.repeat_interleave(len(part)), sound=sound)
        worst = worst_place(margins.unflatten(0, (len(x), -1)), y, worst)
    assert worst is not None
    return worst


def _until_failure(
    graph: Graph, x: Tensor, y: Tensor, masks: Tensor, threat: Threat, *, sound: bool, chunk: int
) -> Worst:
    """`worst_masks` of the inputs whose bounds hold at every mask; minus infinity and the mask that failed otherwise.

    Each round looks at a few masks for the inputs that are left, and at twice as many the next time.
    """
    margins = x.new_full((len(x), graph.nodes[-1].shape[0]), torch.inf)
    least, place = margins[:, 0].clone(), torch.zeros(len(x), dtype=torch.long, device=x.device)
    share = masks.double() / masks.double().sum((1, 2), keepdim=True)
    row, column = (
        share.sum(3 - d) @ (torch.arange(masks.shape[d]) - (masks.shape[d] - 1) / 2).double() for d in (1, 2)
    )
    order, size, left = (row**2 + column**2).argsort(), 4, torch.arange(len(x), device=x.device)
    while len(order) and len(left):
        check_time()
        part, order, size = order[:size], order[size:], 2 * size
        found = worst_masks(graph, x[left], y[left], masks[part], threat, sound=sound, chunk=chunk)
        lower = ~(found.least >= least[left])  # NaN too
        least[left[lower]], place[left[lower]] = found.least[lower], part.to(x.device)[found.place[lower]]
        margins[left] = torch.minimum(margins[left], found.margins)
        failed = ~(found.least > 0)
        rival = found.margins.scatter(1, y[left, None], torch.inf).argmin(1)
        margins[left[failed], rival[failed]] = -torch.inf
        left = left[~failed]
    return Worst(margins, place, least, len(masks))


def pooled_margins(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    masks: Tensor,
    grid: tuple[int, int],
    pools: tuple[int, ...],
    threat: Threat,
    *,
    sound: bool,
) -> Tensor:
    """Bound pooling: after layer i, the union of the boxes of pools[i] x pools[i] neighbouring locations goes on.

    `masks` (L, H, W) lists the locations of `grid` row by row.
    """
    layers, rest = [], graph
    for _ in pools if pools[-1] > 1 else pools[:-1]:
        split = mixing_layer(rest)
        if split == len(rest.nodes) - 1:
            raise InputError("bound pooling needs linear or convolutional layers that all later ones build on")
        layers.append(Graph(rest.nodes[: split + 1]))
        rest = rest.after(split)
    worst = torch.full((len(x), graph.nodes[-1].shape[0]), torch.inf, dtype=x.dtype, device=x.device)
    for rows in torch.arange(len(masks)).view(grid).split(math.prod(pools)):
        lower, upper = mask_boxes(x, masks[rows.flatten()], threat)
        places = tuple(rows.shape)
        for layer, pool in zip(layers, pools, strict=False):
            bounds = interval.output_bounds(layer, lower, upper, sound=sound)
            lower, upper = (
                _pooled(sign * bound.unflatten(0, (len(x), *places)), pool) * sign
                for sign, bound in zip((-1, 1), bounds, strict=True)
            )
            places = (lower.shape[1], lower.shape[2])
            lower, upper = lower.flatten(0, 2), upper.flatten(0, 2)
        margins = interval.margin_bounds(rest, lower, upper, y.repeat_interleave(math.prod(places)), sound=sound)
        worst = torch.minimum(worst, margins.unflatten(0, (len(x), -1)).amin(1))
    return worst


def _pooled(values: Tensor, pool: int) -> Tensor:
    """Maximum over windows of pool x pool places: (B, rows, columns, ...) -> (B, fewer rows, fewer columns, ...)."""
    maps = values.flatten(3).movedim(3, 1)
    pooled: Tensor = F.max_pool2d(maps, pool, ceil_mode=True).movedim(1, 3).unflatten(3, values.shape[3:])
    return pooled


def placements(mask: Tensor, height: int, width: int) -> Tensor:
    """All ways to put a mask (h, w) inside an image, (L, height, width), bool."""
    h, w = mask.shape
    if h > height or w > width:
        raise InputError(f"a shape of {h}x{w} does not fit into an image of {height}x{width} pixels")

    def all_places() -> Iterator[Tensor]:
        for top in range(height - h + 1):
            for left in range(width - w + 1):
                yield F.pad(mask, (left, width - w - left, top, height - h - top))

    return torch.stack(list(all_places()))


def certify_shape(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    shape: str,
    pixels: int,
    *,
    threat: Threat | None = None,
    sound: bool = True,
    chunk_boxes: int = 1024,
) -> CertifyResult:
    """Certify against patches of another shape; for a family of shapes, against every member.

    `shape` is one of `SHAPES`; `threat` gives the valid range, [0, 1] if there is none.
    """
    valid = threat or Patch(1, 1)
    shaped = PatchShape(shape, pixels, low=valid.low, high=valid.high)
    return patch(model, x, y, shaped, sound=sound, chunk_boxes=chunk_boxes)
