"""Decision boundaries of many small networks of the plane, side by side: a row for each group of networks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from holdfast.analyze.volume.family import Family
from holdfast.errors import InputError
from holdfast.utils.show import Svg
from holdfast.utils.svg import figure, text

SIDE, GAP, HEAD = 110, 8, 22  # pixels of a panel, between panels, above a row
COLOURS, MARKS = ("#f6d9c4", "#c8dff0"), ("#d55e00", "#0072b2")  # classes as areas and as points


@torch.no_grad()
def boundaries_svg(
    groups: Mapping[str, tuple[Family, Tensor]],
    x: Tensor,
    y: Tensor,
    *,
    columns: int = 9,
    low: float = -1.0,
    high: float = 1.0,
    cells: int = 50,
    title: str = "Decision boundaries",
) -> Svg:
    """Draw the classes of networks over [low, high]^2 with the points that they were to fit.

    Args:
        groups: family and weights (k, P) by name, one row each; the first `columns` networks are drawn.
        x: points, (B, 2).  y: their labels, 0 or 1, (B,).
        columns: networks in a row at most.
        cells: cells of the colour map along each axis.
    """
    if x.ndim != 2 or x.shape[1] != 2 or y.shape != (len(x),) or int(y.max()) > 1:
        raise InputError(f"expected points (B, 2) with labels 0 and 1, got {tuple(x.shape)}")
    middle = low + (high - low) * (torch.arange(cells, dtype=x.dtype) + 0.5) / cells
    grid, parts, top = torch.cartesian_prod(middle, middle), [], 0
    widest = max((min(columns, len(weights)) for _, weights in groups.values()), default=0)
    for name, (family, weights) in groups.items():
        parts.append(text(GAP, top + 15, name if len(weights) else f"{name}: none"))
        top += HEAD
        if not len(weights):
            continue
        labels = family.logits(weights[:columns], grid).argmax(2).view(-1, cells, cells)
        for column, label in enumerate(labels):
            left = GAP + column * (SIDE + GAP)
            parts += [f'<g transform="translate({left} {top})">', *_areas(label), *_points(x, y, low, high), "</g>"]
        top += SIDE + GAP
    alt = f"{title}: {', '.join(groups)}"
    return Svg(figure(parts, max(300, GAP + widest * (SIDE + GAP)), top + GAP, title=alt, size=11), alt)


def _areas(label: Tensor) -> list[str]:
    """One rectangle for the whole panel, and one for each run of class 1 in a column of the map."""
    cells, found = len(label), [f'<rect width="{SIDE}" height="{SIDE}" fill="{COLOURS[0]}"/>']
    size = SIDE / cells
    for i, column in enumerate(label.tolist()):
        start = None
        for j, value in enumerate([*column, 0]):
            if value == 1 and start is None:
                start = j
            elif value != 1 and start is not None:
                place = f'x="{i * size:.1f}" y="{SIDE - j * size:.1f}" width="{size + 0.1:.1f}"'
                found.append(f'<rect {place} height="{(j - start) * size:.1f}" fill="{COLOURS[1]}"/>')
                start = None
    return found


def _points(x: Tensor, y: Tensor, low: float, high: float) -> list[str]:
    found = []
    for (across, up), label in zip(((x - low) / (high - low) * SIDE).tolist(), y.tolist(), strict=True):
        if 0 <= across <= SIDE and 0 <= up <= SIDE:
            found.append(f'<circle cx="{across:.1f}" cy="{SIDE - up:.1f}" r="2" fill="{MARKS[label]}"/>')
    return found
