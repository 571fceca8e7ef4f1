"""Parts of charts as SVG text: a figure, axes with round numbers, lines that differ in colour and dashes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours stay apart under the common forms of colour blindness; dashes tell them apart in print.
STYLES = (("#0072b2", ""), ("#d55e00", "7 4"), ("#009e73", "2 3"), ("#cc79a7", "9 3 2 3"), ("#000000", "1 5"))


def figure(parts: Iterable[str], width: int, height: int, *, title: str, size: int = 12, fixed: bool = False) -> str:
    """A whole picture: the parts on white, with a title for screen readers.

    Args:
        parts: elements, in the order in which they are drawn.
        width, height: in pixels.
        title: what a screen reader says.
        size: of the text.
        fixed: show it in this width; otherwise it fills the width of the page.
    """
    shown = f' width="{width}"' if fixed else ""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"{shown} font-family="sans-serif" '
        f'font-size="{size}" role="img" aria-label="{escape(title)}">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>\n"])


def text(x: float, y: float, words: str, *, anchor: str = "", size: int = 0, turned: bool = False) -> str:
    """Words at a place; `anchor` is "middle" or "end" of them, `turned` lets them run upwards."""
    place = f'transform="translate({x:.0f} {y:.0f}) rotate(-90)"' if turned else f'x="{x:.1f}" y="{y:.1f}"'
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    sized = f' font-size="{size}"' if size else ""
    return f"<text {place}{anchored}{sized}>{escape(words)}</text>"


def stroke(colour: str, dash: str) -> str:
    """Attributes of a line of that colour, dashed if a pattern is given."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{colour}" stroke-width="2"{dashes}'


@dataclass(frozen=True)
class Axes:
    """Where a chart lies, and what its axes show.

    Attributes:
        left, right, top, bottom: its edges, in pixels.
        x: the values at its left and right edge.
        ticks: values on the vertical axis, increasing, from its lower to its upper edge.
        log: whether the vertical axis is logarithmic.
    """

    left: float
    right: float
    top: float
    bottom: float
    x: tuple[float, float]
    ticks: Sequence[float]
    log: bool = False

    def across(self, x: float) -> float:
        """Pixel of a value on the horizontal axis."""
        low, high = self.x
        return self.left + (self.right - self.left) * ((x - low) / (high - low) if high > low else 0.5)

    def up(self, y: float) -> float:
        """Pixel of a value on the vertical axis."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.ticks[0], self.ticks[-1], y))
        return self.top + (self.bottom - self.top) * (high - value) / (high - low)

    def points(self, xs: Iterable[float], ys: Iterable[float]) -> str:
        """Values as the points of a line or an area."""
        return " ".join(f"{self.across(x):.1f},{self.up(y):.1f}" for x, y in zip(xs, ys, strict=True))

    def line(self, xs: Iterable[float], ys: Iterable[float], style: tuple[str, str], name: str) -> str:
        """A line through values, with its colour, its dashes and its name."""
        return f'<polyline points="{self.points(xs, ys)}" {stroke(*style)}><title>{escape(name)}</title></polyline>'

    def grid(self, x_label: str, x_ticks: Mapping[float, str]) -> list[str]:
        """A thin line and a number for each tick, the ticks of the horizontal axis, and its label."""
        parts = []
        for tick in self.ticks:
            y = self.up(tick)
            ends = f'x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"'
            parts += [f'<line {ends} stroke="#dddddd"/>', text(self.left - 7, y + 4, f"{tick:g}", anchor="end")]
        parts += [text(self.across(x), self.bottom + 17, words, anchor="middle") for x, words in x_ticks.items()]
        return [*parts, text((self.left + self.right) / 2, self.bottom + 35, x_label, anchor="middle")]


def rounds(low: float, high: float) -> list[float]:
    """About five round numbers over [low, high] and past its ends."""
    size = (high - low) / 4 or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(size))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size * (1 - 1e-9))
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def inner_rounds(low: float, high: float) -> dict[float, str]:
    """Round numbers inside [low, high], each with its text."""
    ticks = [tick for tick in rounds(low, high) if low <= tick <= high] if high > low else [low]
    return {tick: f"{tick:g}" for tick in ticks}


def decades(low: float, high: float) -> list[float]:
    """Powers of ten, if few also twice and five times them, that enclose [low, high]."""
    start, stop = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if stop - start <= 3 else (1,)
    # One power more at either end, in case a logarithm was rounded across a whole number.
    marks = [float(f"{factor}e{power}") for power in range(start - 1, stop + 2) for factor in factors]
    first = max(i for i, mark in enumerate(marks) if mark <= low)
    last = max(first + 1, min(i for i, mark in enumerate(marks) if mark >= high))
    return marks[first : last + 1]
