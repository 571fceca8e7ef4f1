"""The bracket as a picture: inline SVG that follows the colours of the page and can be read without a mouse."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from holdfast.audits.bracket import Bracket, Level, interval_text, percent

_WIDTH, _HEIGHT = 560, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 44, 72, 58
_TIP_WIDTH, _TIP_LINE = 272, 19
_MAX_TICKS = 7
_LETTER = 11  # width of a letter on a phone, where the drawing is at half its size
_BAR = 160  # length of a range bar: 100 %
UNITS = {
    "linf": "largest change of a value (linf)",
    "l2": "Euclidean size of the change (l2)",
    "l1": "sum of the changes (l1)",
    "patch": "pixels under the patch",
    "sparse": "changed pixels",
    "box": "share of the box",
}


def bracket_plot(bracket: Bracket) -> str:
    """SVG of the certified and the attacked curve, the band of doubt between them, and the clean accuracy.

    Each budget is a place to point at, to tap or to reach with the tab key, which then shows its numbers. This takes
    style sheets alone; where there are none, the numbers stay hidden and the picture is whole.
    """
    levels = bracket.levels
    largest = levels[-1].budget
    xs = [_LEFT + (_WIDTH - _LEFT - _RIGHT) * level.budget / largest for level in levels]
    attacked = [(x, _y(level.attacked_accuracy)) for x, level in zip(xs, levels, strict=True)]
    certified = [(x, _y(level.certified_accuracy)) for x, level in zip(xs, levels, strict=True)]
    clean = _y(bracket.clean)
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="group" aria-label="{escape(_summary(bracket))}">',
        *_grid(),
        *([f'<polygon class="band" points="{_points(attacked)} {_points(certified[::-1])}"/>'] * bracket.proved),
        f'<line class="clean" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{clean:.1f}" y2="{clean:.1f}"/>',
        *([f'<polyline class="line certified" points="{_points(certified)}"/>'] * bracket.proved),
        f'<polyline class="line attacked" points="{_points(attacked)}"/>',
        *_marks(certified if bracket.proved else [], attacked),
        *_budget_axis(levels, xs, bracket.threat),
        *_legend(has_proof=bracket.proved),
        *_stops(levels, xs, has_proof=bracket.proved),
        "</svg>",
    ]
    return "\n".join(parts)


def range_bar(clean: float, largest: Level, *, has_proof: bool = True) -> str:
    """SVG of one bracket as a bar for a cell of a table, which has the same as numbers: 0 at the left, 1 at the right.

    A square for what is proved, a circle for what survived, the band of doubt between, a line at the clean accuracy.
    Without a certificate neither square nor band: nothing is known of the lower end.
    """
    low, high, mark = (8 + _BAR * share for share in (largest.certified_accuracy, largest.attacked_accuracy, clean))
    band = f'<rect class="band" x="{low:.1f}" y="4" width="{high - low:.1f}" height="8"/>'
    square = f'<rect class="mark certified" x="{low - 4:.1f}" y="4" width="8" height="8"/>'
    return (
        f'<svg class="range" viewBox="0 0 {_BAR + 16} 16" aria-hidden="true" focusable="false">'
        f'<line class="track" x1="8" x2="{_BAR + 8}" y1="8" y2="8"/>'
        f"{band * has_proof}"
        f'<line class="clean" x1="{mark:.1f}" x2="{mark:.1f}" y1="1" y2="15"/>'
        f'<circle class="mark attacked" cx="{high:.1f}" cy="8" r="5"/>'
        f"{square * has_proof}</svg>"
    )


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _summary(bracket: Bracket) -> str:
    return f"Accuracy against budget. {bracket.headline} Clean accuracy {percent(bracket.clean)}."


def _grid() -> list[str]:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    lines = [
        f'<text class="axis" transform="translate(21 {middle:.0f}) rotate(-90)" text-anchor="middle">accuracy</text>'
    ]
    for step in range(0, 101, 25):
        y = _y(step / 100)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 9}" y="{y + 4.5:.1f}" text-anchor="end">{step} %</text>')
    return lines


def _marks(certified: Sequence[tuple[float, float]], attacked: Sequence[tuple[float, float]]) -> list[str]:
    """Squares and circles, so that the curves differ by more than their colour."""
    squares = [
        f'<rect class="mark certified" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"/>' for x, y in certified
    ]
    return squares + [f'<circle class="mark attacked" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>' for x, y in attacked]


def _stops(levels: Sequence[Level], xs: Sequence[float], *, has_proof: bool) -> list[str]:
    """One group for each budget, above all else that is drawn: a strip that catches the pointer, and the numbers."""
    # The strips meet half-way between two budgets.
    ends = [_LEFT - 10, *((a + b) / 2 for a, b in pairwise(xs)), _WIDTH - _RIGHT + 10]
    groups = []
    for level, x, (left, right) in zip(levels, xs, pairwise(ends), strict=True):
        lines = _reading(level, has_proof=has_proof)
        strip = f'x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}"'
        groups += [
            f'<g class="stop" tabindex="0" role="img" aria-label="{escape("; ".join(lines))}">',
            f'<rect class="strip" {strip} fill="none" pointer-events="all"/>',
            f'<line class="guide" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" visibility="hidden"/>',
            *_tip(lines, x),
            "</g>",
        ]
    return groups


def _reading(level: Level, *, has_proof: bool) -> list[str]:
    """What is known at one budget, as lines."""
    if level.budget == 0:
        interval = interval_text(level.attacked_interval)
        return [f"unchanged, {level.inputs} inputs", f"clean: {percent(level.attacked_accuracy)} ({interval})"]
    attacked = f"under attack: {percent(level.attacked_accuracy)} ({interval_text(level.attacked_interval)})"
    if not has_proof:
        return [f"{level.threat}, {level.inputs} inputs", attacked]
    return [
        f"{level.threat}, {level.inputs} inputs",
        attacked,
        f"certified: {percent(level.certified_accuracy)} ({interval_text(level.certified_interval)})",
        f"undecided: {level.attacked - level.certified}",
    ]


def _tip(lines: Sequence[str], x: float) -> list[str]:
    """The numbers in a box beside `x`, on the side where there is room, low in the plot where the curves start high."""
    left = x + 14 if x + 14 + _TIP_WIDTH < _WIDTH else max(4, x - 14 - _TIP_WIDTH)
    height = _TIP_LINE * len(lines) + 16
    top = _HEIGHT - _BOTTOM - height - 10
    texts = [
        f'<text x="{left + 12:.1f}" y="{top + 22 + _TIP_LINE * i:.1f}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    box = f'<rect x="{left:.1f}" y="{top}" width="{_TIP_WIDTH}" height="{height}" rx="7"/>'
    return ['<g class="tip" visibility="hidden" aria-hidden="true">', box, *texts, "</g>"]


def _budget_axis(levels: Sequence[Level], xs: Sequence[float], threat: str) -> list[str]:
    longest = max(len(level.size) for level in levels)
    room = min(_MAX_TICKS, (_WIDTH - _LEFT) // (_LETTER * (longest + 1)))
    every = -(-len(levels) // max(2, room))
    ticks = []
    # Counted from the largest budget, which the headline is about and which must have its number.
    for x, level in list(zip(xs, levels, strict=True))[::-1][::every]:
        size = escape(level.size if level.budget else "0")
        ticks.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{size}</text>')
    unit = UNITS.get(threat.partition(":")[0], threat)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    label = f'<text class="axis" x="{middle:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">budget: {escape(unit)}</text>'
    return [*ticks, label]


def _legend(*, has_proof: bool) -> list[str]:
    """Two rows of two, with room for the larger letters that a phone gets; what was not run has none."""
    items = [
        ("under attack", '<circle class="mark attacked" cx="{x}" cy="{y}" r="4.5"/>'),
        ("clean", '<line class="clean" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>'),
    ]
    if has_proof:
        items.insert(1, ("certified", '<rect class="mark certified" x="{left}" y="{top}" width="9" height="9"/>'))
        items.insert(2, ("undecided", '<rect class="band" x="{left}" y="{top}" width="13" height="9"/>'))
    parts = []
    for i, (name, mark) in enumerate(items):
        x, y = _LEFT + 8 + 200 * (i % 2), 20 + 28 * (i // 2)
        parts.append(mark.format(x=x, y=y, left=x - 6, right=x + 10, top=y - 4.5))
        parts.append(f'<text x="{x + 18}" y="{y + 5}">{name}</text>')
    return parts
