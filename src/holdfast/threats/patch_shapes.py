"""Shapes of patches other than rectangles of given sides: lines, parallelograms, diamonds."""

import math

import torch
from torch import Tensor

from holdfast.errors import InputError, did_you_mean

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
