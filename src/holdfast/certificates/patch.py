"""Patches: one interval pass for every place, shapes other than rectangles, and bound pooling."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.bounding import interval
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.core.margins import from_margins, interval_margins
from holdfast.errors import InputError, did_you_mean
from holdfast.registry import Certificate, register
from holdfast.results import CertifyResult
from holdfast.threats import Patch, Threat
from holdfast.utils.options import Count


@register(
    Certificate(
        "patch",
        summary="intervals for every location of the patch, optionally pooled over neighbouring locations",
        threats=("patch",),
        reference="Chiang et al., Certified defenses for adversarial patches, 2020",
    )
)
def patch(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Patch,
    *,
    pool: Count = 1,
    early: bool = False,
    sound: bool = True,
    chunk_boxes: Count = 1024,
) -> CertifyResult:
    """Certified if the interval bound of every margin is above zero at every location.

    Args:
        model: from (B, C, H, W) to logits (B, K).  x: inputs.  y: labels, shape (B,).
        threat: the patch.
        pool: merge the bounds of pool x pool neighbouring locations after the first layer; looser, and up to pool^2
            times faster. 1 keeps all of them.
        early: give up on an input at the first location at which its bound fails, beginning in the middle of the image;
            its margin is then minus infinity. Not with `pool`.
        sound: account for floating-point rounding.
        chunk_boxes: boxes in memory at a time.
    """
    masks = threat.masks(threat.locations(tuple(x.shape[1:])), tuple(x.shape[1:]))[:, 0]
    if early and pool != 1:
        raise InputError(f"'patch' takes early=True or pool={pool}, not both")
    graph = trace(model, x, threat)
    if early:
        margins = _until_failure(graph, x, y, masks, threat, sound=sound, chunk=chunk_boxes)
    elif pool == 1:
        margins = mask_margins(graph, x, y, masks, threat, sound=sound, chunk=chunk_boxes)
    else:
        grid = (x.shape[2] - threat.height + 1, x.shape[3] - threat.width + 1)
        margins = pooled_margins(graph, x, y, masks, grid, pool, threat, sound=sound)
    return from_margins(margins, y, "patch")


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
    worst = torch.full((len(x), graph.nodes[-1].shape[0]), torch.inf, dtype=x.dtype, device=x.device)
    for part in masks.split(max(1, chunk // len(x))):
        lower, upper = mask_boxes(x, part, threat)
        box = Region(lower, upper, x.repeat_interleave(len(part), 0))
        margins = interval_margins(graph, box, y.repeat_interleave(len(part)), sound=sound)
        worst = torch.minimum(worst, margins.unflatten(0, (len(x), -1)).amin(1))
    return worst


def _until_failure(
    graph: Graph, x: Tensor, y: Tensor, masks: Tensor, threat: Threat, *, sound: bool, chunk: int
) -> Tensor:
    """`mask_margins` of the inputs whose bounds hold at every mask; minus infinity for the others.

    Each round looks at a few masks for the inputs that are left, and at twice as many the next time.
    """
    worst = x.new_full((len(x), graph.nodes[-1].shape[0]), torch.inf)
    share = masks.double() / masks.double().sum((1, 2), keepdim=True)
    row, column = (
        share.sum(3 - d) @ (torch.arange(masks.shape[d]) - (masks.shape[d] - 1) / 2).double() for d in (1, 2)
    )
    masks, size, left = masks[(row**2 + column**2).argsort()], 4, torch.arange(len(x), device=x.device)
    while len(masks) and len(left):
        part, masks, size = masks[:size], masks[size:], 2 * size
        found = mask_margins(graph, x[left], y[left], part, threat, sound=sound, chunk=chunk)
        worst[left] = torch.minimum(worst[left], found)
        failed = ~(found.scatter(1, y[left, None], torch.inf).amin(1) > 0)
        worst[left[failed]] = -torch.inf
        left = left[~failed]
    return worst


def pooled_margins(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    masks: Tensor,
    grid: tuple[int, int],
    pool: int,
    threat: Threat,
    *,
    sound: bool,
) -> Tensor:
    """Bound pooling: after the first layer, the union of the boxes of pool x pool neighbouring locations goes on.

    `masks` (L, H, W) lists the locations of `grid` row by row.
    """
    split = next(i for i, node in enumerate(graph.nodes) if isinstance(node.op, ops.Linear | ops.Conv)) + 1
    if split == len(graph.nodes) or any(j < split - 1 for node in graph.nodes[split:] for j in node.inputs):
        raise InputError("bound pooling needs a network whose first linear or convolutional layer all others build on")
    first, rest = Graph(graph.nodes[:split]), graph.after(split - 1)
    worst = torch.full((len(x), graph.nodes[-1].shape[0]), torch.inf, dtype=x.dtype, device=x.device)
    for rows in torch.arange(len(masks)).view(grid).split(pool):
        bounds = [
            interval.output_bounds(first, *mask_boxes(x, masks[rows.flatten()], threat), sound=sound)[side]
            for side in (0, 1)
        ]
        lower, upper = (
            _pooled(sign * bound.unflatten(0, (len(x), *rows.shape)), pool) * sign
            for sign, bound in zip((-1, 1), bounds, strict=True)
        )
        count = lower.shape[0] // len(x)
        margins = interval.margin_bounds(rest, lower, upper, y.repeat_interleave(count), sound=sound)
        worst = torch.minimum(worst, margins.unflatten(0, (len(x), count)).amin(1))
    return worst


def _pooled(values: Tensor, pool: int) -> Tensor:
    """Maximum over the rows and over groups of `pool` columns: (B, rows, columns, ...) -> (B * groups, ...)."""
    tail = values.shape[3:]
    columns = values.amax(1).flatten(2).movedim(1, 2)
    pooled = F.max_pool1d(columns, pool, ceil_mode=True)
    groups: Tensor = pooled.movedim(2, 1).flatten(0, 1).unflatten(1, tail)
    return groups


SHAPES = ("square", "rectangle", "line", "parallelogram", "diamond")


def shape_masks(shape: str, pixels: int) -> list[Tensor]:
    """The members of a family of shapes with (about) that many pixels, each a bool mask (h, w).

    square: side x side. rectangle: all a x b with pixels <= a b <= pixels + 2, a != b, a, b > 1. line: 1 x n and n x 1.
    parallelogram: side rows of side pixels, each row shifted by one. diamond: a ball in the L1 norm; if none has that
    many pixels, the next smaller one around a pixel and a part of the ring around it, tips first.
    """
    if shape not in SHAPES:
        raise InputError(f"unknown shape '{shape}'. " + did_you_mean(shape, SHAPES))
    if pixels < 1:
        raise InputError(f"a shape needs at least one pixel, got {pixels}")
    side = math.isqrt(pixels)
    if shape in ("square", "parallelogram") and side * side != pixels:
        raise InputError(f"a {shape} needs a square number of pixels, got {pixels}")
    match shape:
        case "square":
            return [torch.ones(side, side, dtype=torch.bool)]
        case "line":
            return [torch.ones(1, pixels, dtype=torch.bool), torch.ones(pixels, 1, dtype=torch.bool)]
        case "parallelogram":
            mask = torch.zeros(side, 2 * side - 1, dtype=torch.bool)
            for row in range(side):
                mask[row, row : row + side] = True
            return [mask]
        case "rectangle":
            sides = [(a, b) for a in range(2, pixels) for b in range(2, pixels) if pixels <= a * b <= pixels + 2]
            return [torch.ones(a, b, dtype=torch.bool) for a, b in sides if a != b]
    return [_diamond(pixels)]


CENTRES = ((0.0, 0.0), (0.5, 0.5), (0.0, 0.5))
"""Where a ball may have its centre, (row, column): in a pixel, at a corner of four, between two neighbours."""


def _diamond(pixels: int) -> Tensor:
    """The ball |i| + |j| <= r with that many pixels, or where none has, a ball around a pixel with a part of its ring.

    Balls around a pixel have 1, 5, 13, 25, ... pixels, around a corner of four 12, 24, 40, ... (the one with 4 is a
    square), between two neighbours 2, 8, 18, 32, ...
    """
    reach = math.isqrt(2 * pixels) + 1
    axis = torch.arange(-reach, reach + 1)
    for row, column in CENTRES:
        far = (axis - row).abs()[:, None] + (axis - column).abs()
        ball = far <= far.flatten().sort().values[pixels - 1]
        if int(ball.sum()) == pixels != 4:
            return _trimmed(ball)
    return _trimmed(_part_of_a_ring(pixels, axis))


def _part_of_a_ring(pixels: int, axis: Tensor) -> Tensor:
    """A whole ball around a pixel and the missing pixels from the next ring, symmetric from left to right.

    The tips of the ring come first: of pixels that are equally near in the L1 norm those farthest in the L2 norm. The
    other way round, the corners of a square would. Equally far ones come row by row, in pairs left and right of the
    middle, the middle rows first. If their number is odd, the upper tip has no partner, and the lower one comes last.
    """
    row, column = torch.meshgrid(axis, axis, indexing="ij")
    row, column = row.flatten(), column.flatten()
    alone = (column == 0).long() * row.sign() if pixels % 2 == 0 else torch.zeros_like(row)
    order = torch.arange(len(row))
    for key in (column, row, row.abs(), -(row.square() + column.square()), alone, row.abs() + column.abs()):
        order = order[key[order].argsort(stable=True)]  # the last key counts most
    return torch.zeros(len(row), dtype=torch.bool).scatter(0, order[:pixels], True).view(len(axis), -1)


def _trimmed(mask: Tensor) -> Tensor:
    """Without empty rows and columns around it."""
    rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
    return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


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

    Args:
        model: from (B, C, H, W) to logits (B, K).  x: inputs.  y: labels, shape (B,).
        shape: one of square, rectangle, line, parallelogram, diamond.
        pixels: size of the shape.
        threat: gives the valid range; [0, 1] if none is given.
        sound: account for floating-point rounding.
        chunk_boxes: boxes in memory at a time.
    """
    masks = [placements(mask, x.shape[2], x.shape[3]) for mask in shape_masks(shape, pixels)]
    valid = threat or Patch(1, 1)
    graph = trace(model, x, valid)
    margins = [mask_margins(graph, x, y, m, valid, sound=sound, chunk=chunk_boxes) for m in masks]
    return from_margins(torch.stack(margins).amin(0), y, "patch")
