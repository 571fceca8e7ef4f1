"""The curves of a training run as one picture: losses on the left, accuracies on held-out inputs on the right."""

import math
from collections.abc import Mapping, Sequence

from holdfast.utils.panels import line_keys, panel_at, panel_axes, panels_figure
from holdfast.utils.svg import STYLES, inner_rounds

_LOSS = "train_loss"
_BLACK = ("#000000", "")  # the loss has a panel of its own, and no place in the legend
_DOTS = 30  # epochs up to which every value gets a dot


def is_accuracy(key: str) -> bool:
    """Whether a figure of the history is an accuracy on held-out inputs."""
    return key.startswith("validation_")


def curves(rows: Sequence[Mapping[str, float]], title: str) -> str:
    """Draw the loss and, where inputs were held out, up to five accuracies over the epochs.

    Args:
        rows: one per epoch with "epoch" and its figures; values that are not finite are left out.
        title: above the picture.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    accuracies = [key for key in keys if is_accuracy(key)][: len(STYLES)]
    panels = {"loss on the training inputs": [key for key in keys if key == _LOSS]}
    panels["accuracy on held-out inputs"] = accuracies
    drawn = {name: shown for name, shown in panels.items() if shown}
    parts: list[str] = []
    for column, (name, shown) in enumerate(drawn.items()):
        parts += _panel(column, name, rows, shown)
    names = [key.removeprefix("validation_") for key in accuracies]
    return panels_figure(title, max(1, len(drawn)), 1, parts, line_keys(names))


def _panel(column: int, name: str, rows: Sequence[Mapping[str, float]], keys: Sequence[str]) -> list[str]:
    found = {key: [(row["epoch"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))] for key in keys}
    epochs = [row["epoch"] for row in rows]
    values = [value for points in found.values() for _, value in points]
    panel = panel_at(column, 0, epochs, [0.0, 1.0] if is_accuracy(keys[0]) else values)
    parts = panel_axes(
        panel, name, "epoch", {t: s for t, s in inner_rounds(min(epochs), max(epochs)).items() if t % 1 == 0}
    )
    for (key, points), style in zip(found.items(), STYLES if is_accuracy(keys[0]) else (_BLACK,), strict=False):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        parts.append(panel.line(xs, ys, style, key.removeprefix("validation_")))
        dots = points if len(points) <= _DOTS else ()
        parts += [
            f'<circle cx="{panel.across(x):.1f}" cy="{panel.up(y):.1f}" r="3" fill="{style[0]}"/>' for x, y in dots
        ]
    return parts
