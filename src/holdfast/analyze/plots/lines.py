"""A line chart as SVG: how numbers went over the epochs of several runs."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from holdfast.errors import InputError

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 55
# Okabe and Ito's colours stay apart under the common forms of colour blindness; dashes tell them apart in print.
STYLES = (("#0072b2", ""), ("#d55e00", "7 4"), ("#009e73", "2 3"), ("#cc79a7", "9 3 2 3"), ("#000000", "1 5"))


def lines_svg(
    lines: Mapping[str, Sequence[float]], *, title: str, y_label: str, x_label: str = "epoch", log: bool = False
) -> str:
    """One line for each name over 1, 2, ..., with a legend.

    Args:
        lines: values by name; at most five lines, each with at least one value, all finite.
        title: above the chart.
        y_label, x_label: of the axes.
        log: logarithmic vertical axis; all values must then be > 0.
    """
    values = [value for line in lines.values() for value in line]
    if not lines or len(lines) > len(STYLES) or not all(map(len, lines.values())):
        raise InputError(f"expected 1 to {len(STYLES)} lines, none of them empty, got {list(lines)}")
    if not all(map(math.isfinite, values)) or (log and min(values) <= 0):
        raise InputError(f"values must be finite{', and > 0 on a logarithmic axis' if log else ''}")
    steps = max(map(len, lines.values()))
    ticks = decades(min(values), max(values)) if log else rounds(min(values), max(values))
    scale = math.log10 if log else float
    low, high = (scale(end) for end in (min(ticks[0], min(values)), max(ticks[-1], max(values))))

    def across(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(steps - 1, 1)

    def up(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - scale(value)) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="15">{escape(title)}</text>',
    ]
    for tick in ticks:
        y = up(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{tick:g}</text>')
    for step in sorted({1} | {int(tick) for tick in rounds(1, steps) if 1 <= tick <= steps and tick == int(tick)}):
        anchor = f'x="{across(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle"'
        parts.append(f"<text {anchor}>{step}</text>")
    for (name, line), (colour, dash) in zip(lines.items(), STYLES, strict=False):
        points = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in enumerate(line, 1))
        parts.append(f'<polyline points="{points}" {stroke(colour, dash)}><title>{escape(name)}</title></polyline>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="translate(18 {middle:.0f}) rotate(-90)" text-anchor="middle"'
    parts.append(f"<text {turned}>{escape(y_label)}</text>")
    centre = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{centre:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    return "\n".join([*parts, *_legend(list(lines)), "</svg>\n"])


def stroke(colour: str, dash: str) -> str:
    """Attributes of a line of that colour, dashed if a pattern is given."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{colour}" stroke-width="2"{dashes}'


def _legend(names: Sequence[str]) -> list[str]:
    parts, width = [], (WIDTH - LEFT - RIGHT) / len(STYLES)
    for i, (name, (colour, dash)) in enumerate(zip(names, STYLES, strict=False)):
        x = LEFT + i * width
        parts.append(f'<line x1="{x:.0f}" x2="{x + 26:.0f}" y1="36" y2="36" {stroke(colour, dash)}/>')
        parts.append(f'<text x="{x + 32:.0f}" y="40.5">{escape(name)}</text>')
    return parts


def rounds(low: float, high: float) -> list[float]:
    """About five round numbers over [low, high] and past its ends."""
    size = (high - low) / 4 or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(size))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size * (1 - 1e-9))
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten, if few also twice and five times them, that enclose [low, high]."""
    start, stop = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if stop - start <= 3 else (1,)
    # One power more at either end, in case a logarithm was rounded across a whole number.
    marks = [float(f"{factor}e{power}") for power in range(start - 1, stop + 2) for factor in factors]
    first = max(i for i, mark in enumerate(marks) if mark <= low)
    last = max(first + 1, min(i for i, mark in enumerate(marks) if mark >= high))
    return marks[first : last + 1]
