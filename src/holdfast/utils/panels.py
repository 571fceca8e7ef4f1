"""Several small charts side by side as one picture, with a title and one legend above them."""

from collections.abc import Mapping, Sequence
from html import escape

from holdfast.errors import InputError
from holdfast.utils.svg import STYLES, Axes, decades, figure, rounds, stroke, text

WIDTH, HEIGHT, HEAD = 360, 270, 54  # of a panel with its labels; above all panels
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 44  # from the edges of a panel to its axes


def panel_at(column: int, row: int, xs: Sequence[float], ys: Sequence[float], *, log: bool = False) -> Axes:
    """Axes around the values; logarithmic only if that is possible."""
    if not ys:
        raise InputError("nothing to draw: no value is finite")
    log = log and min(ys) > 0
    left, top = WIDTH * column, HEAD + HEIGHT * row
    edges = (left + LEFT, left + WIDTH - RIGHT, top + TOP, top + HEIGHT - BOTTOM)
    return Axes(*edges, (min(xs), max(xs)), (decades if log else rounds)(min(ys), max(ys)), log)


def panel_axes(panel: Axes, title: str, x_label: str, x_ticks: Mapping[float, str]) -> list[str]:
    """Title, grid and labels of one panel."""
    return [text(panel.left, panel.top - 12, title, size=14), *panel.grid(x_label, x_ticks)]


def line_keys(names: Sequence[str] | Mapping[str, object]) -> list[tuple[str, str]]:
    """Name and mark of each line for the legend, in the order of `STYLES`."""
    return [(n, f'<path d="M0-4h24" {stroke(*style)}/>') for n, style in zip(names, STYLES, strict=False)]


def panels_figure(title: str, columns: int, rows: int, parts: Sequence[str], keys: Sequence[tuple[str, str]]) -> str:
    """The whole picture: the title, the legend in as many lines as it needs, then the panels."""
    width, x, y, legend = WIDTH * columns, LEFT, 44, [text(LEFT, 20, title, size=16)]
    for name, mark in keys:
        size = 44 + 7 * len(name)  # about the width of the text
        if x > LEFT and x + size > width:
            x, y = LEFT, y + 18
        legend.append(f'<g transform="translate({x} {y})">{mark}<text x="30">{escape(name)}</text></g>')
        x += size
    moved = [f'<g transform="translate(0 {y - 44})">', *parts, "</g>"]
    return figure([*legend, *moved], width, y - 44 + HEAD + HEIGHT * rows, title=title)
