"""A map of values over the plane, as SVG."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from holdfast.errors import InputError
from holdfast.utils.svg import figure, text

SIDE = 330


def heat_svg(grid: npt.NDArray[np.float64], steps: Sequence[float], *, title: str) -> str:
    """Values (n, n) at the places `steps` of both axes, dark where they are high; the ends of the scale are printed."""
    if grid.shape != (len(steps), len(steps)) or not np.isfinite(grid).all():
        raise InputError(f"the map needs {len(steps)} x {len(steps)} finite values, got {grid.shape}")
    low, high = float(grid.min()), float(grid.max())
    side, parts = SIDE / len(steps), [text(40 + SIDE / 2, 20, title, anchor="middle")]
    for (i, j), value in np.ndenumerate(grid):
        share = (value - low) / (high - low) if high > low else 0.0
        red, green, blue = (round(255 + share * (end - 255)) for end in (11, 60, 110))
        parts.append(
            f'<rect x="{40 + i * side:.1f}" y="{30 + SIDE - (j + 1) * side:.1f}" width="{side + 0.3:.1f}" '
            f'height="{side + 0.3:.1f}" fill="rgb({red},{green},{blue})"><title>{value:.4g}</title></rect>'
        )
    ends = f"{steps[0]:g} to {steps[-1]:g} on both axes"
    parts.append(text(40, 50 + SIDE, f"{ends}; loss {low:.4g} (light) to {high:.4g} (dark)"))
    return figure(parts, SIDE + 80, SIDE + 65, title=title)
