"""A picture of a classifier of the plane, with boxes around points."""

from collections.abc import Mapping
from html import escape

import torch
from torch import Tensor, nn

from holdfast.checks import check_model
from holdfast.errors import InputError

SIZE = 600  # pixels of the picture's side
STROKES = ("#000000", "#d0021b", "#0b5cad", "#3a7d1c")


@torch.no_grad()
def plane_svg(
    model: nn.Module, x: Tensor, boxes: Mapping[str, Tensor], *, low: float = 0.0, high: float = 1.0, cells: int = 120
) -> str:
    """The classes over [low, high]^2 as colours, the points x, and boxes around them, as SVG.

    Args:
        model: from (B, 2) to logits (B, K), in eval mode.
        x: points, shape (B, 2).
        boxes: half-widths (B, 2) of boxes around the points, by name; drawn in this order.
        low, high: part of the plane that is drawn.
        cells: cells of the colour map along each axis.
    """
    check_model(model)
    if x.ndim != 2 or x.shape[1] != 2:
        raise InputError(f"the picture needs points of the plane, shape (B, 2), got {tuple(x.shape)}")
    if len(boxes) > len(STROKES) or any(radius.shape != x.shape for radius in boxes.values()):
        raise InputError(f"boxes must be at most {len(STROKES)} sets of half-widths of shape {tuple(x.shape)}")
    middle = low + (high - low) * (torch.arange(cells, dtype=x.dtype, device=x.device) + 0.5) / cells
    label = model(torch.cartesian_prod(middle, middle)).argmax(1).view(cells, cells)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE + 30}" font-family="sans-serif">',
        f'<clipPath id="frame"><rect width="{SIZE}" height="{SIZE}"/></clipPath>',
        '<g clip-path="url(#frame)">',
        *_colours(label),
    ]
    for (name, radius), stroke in zip(boxes.items(), STROKES, strict=False):
        parts.append(f'<g fill="none" stroke="{stroke}" stroke-width="1.5"><title>{escape(name)}</title>')
        for (left, bottom), (right, top) in zip((x - radius).tolist(), (x + radius).tolist(), strict=True):
            a, b, c, d = (_place(v, low, high) for v in (left, right, bottom, top))
            parts.append(f'<rect x="{a:.2f}" y="{SIZE - d:.2f}" width="{b - a:.2f}" height="{d - c:.2f}"/>')
        parts.append("</g>")
    for point in x.tolist():
        across, up = (_place(v, low, high) for v in point)
        parts.append(f'<circle cx="{across:.2f}" cy="{SIZE - up:.2f}" r="2"/>')
    parts.append("</g>")
    for i, (name, stroke) in enumerate(zip(boxes, STROKES, strict=False)):
        parts.append(f'<text x="{10 + 150 * i}" y="{SIZE + 20}" font-size="14" fill="{stroke}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _place(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) * SIZE


def _colours(label: Tensor) -> list[str]:
    """One rectangle for each run of equal labels in a column of the map (columns: first coordinate)."""
    cells, found = len(label), []
    side = SIZE / cells
    for i, column in enumerate(label.tolist()):
        start = 0
        for j in range(1, cells + 1):
            if j == cells or column[j] != column[start]:
                hue = (column[start] * 137) % 360  # the golden angle sets neighbours apart
                found.append(
                    f'<rect x="{i * side:.2f}" y="{SIZE - j * side:.2f}" width="{side + 0.3:.2f}" '
                    f'height="{(j - start) * side + 0.3:.2f}" fill="hsl({hue},60%,82%)"/>'
                )
                start = j
    return found
