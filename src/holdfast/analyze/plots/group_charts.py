"""How the groups of easy and hard examples are fitted through the epochs of a run, as SVG text."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from holdfast.errors import InputError
from holdfast.utils.panels import line_keys, panel_at, panel_axes, panels_figure
from holdfast.utils.svg import STYLES, inner_rounds

SHOWN = (0, 3, 6, 9)
"""Groups that are drawn, of ten: the hardest is 0."""


def groups_svg(
    means: Mapping[str, Tensor],
    *,
    shown: Sequence[int] = SHOWN,
    errors: Mapping[str, Sequence[float]] | None = None,
    title: str = "Groups of difficulty through the epochs",
) -> str:
    """A panel for each measure with a line for each group, and one for errors over the same epochs.

    Args:
        means: what `analyze.difficulty.group_means` gave for each measure, (epochs, count) each; values that are not
            finite are left out.
        shown: the groups to draw, at most five.
        errors: such as the error under attack on other data; a value for each epoch.
    """
    if not means or not 1 <= len(shown) <= len(STYLES) or any(max(shown) >= m.shape[1] for m in means.values()):
        raise InputError(f"expected at least one measure and 1 to {len(STYLES)} groups that it has, got {list(shown)}")
    panels = {name: {f"group {i}": value[:, i].tolist() for i in shown} for name, value in means.items()}
    panels |= {name: {"": list(values)} for name, values in (errors or {}).items()}
    parts: list[str] = []
    for column, (name, lines) in enumerate(panels.items()):
        epochs = max(map(len, lines.values()))
        values = [v for line in lines.values() for v in line if math.isfinite(v)]
        panel = panel_at(column, 0, (1, max(2, epochs)), values)
        parts += panel_axes(panel, name, "epoch", {1: "1", **inner_rounds(1, max(2, epochs))})
        for (line, at), style in zip(lines.items(), STYLES, strict=False):
            seen = [(i, v) for i, v in enumerate(at, 1) if math.isfinite(v)]
            parts.append(panel.line([i for i, _ in seen], [v for _, v in seen], style, line or name))
    return panels_figure(title, len(panels), 1, parts, line_keys([f"group {i}" for i in shown]))
