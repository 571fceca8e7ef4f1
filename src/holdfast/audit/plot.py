"""The bracket as a picture: accuracy against budget, as inline SVG that follows the colours of the page."""

from collections.abc import Sequence
from html import escape

from holdfast.audit.result import Audit, Level, interval_text, percent

_WIDTH, _HEIGHT = 560, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 18, 46, 58
_MAX_TICKS = 7
_UNITS = {
    "linf": "largest change of a value (linf)",
    "l2": "Euclidean size of the change (l2)",
    "l1": "sum of the changes (l1)",
    "patch": "pixels under the patch",
    "sparse": "changed pixels",
    "box": "share of the box",
}


def bracket_plot(audit: Audit) -> str:
    """SVG of the certified and the attacked curve, the band of doubt between them, and the clean accuracy."""
    levels = audit.levels
    largest = levels[-1].budget

    def x(level: Level) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * level.budget / largest

    attacked = [(x(level), _y(level.attacked_accuracy)) for level in levels]
    certified = [(x(level), _y(level.certified_accuracy)) for level in levels]
    clean = _y(audit.clean)
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(_summary(audit))}">',
        *_grid(),
        f'<polygon class="band" points="{_points(attacked)} {_points(certified[::-1])}">'
        "<title>Undecided: neither broken nor proved</title></polygon>",
        f'<line class="clean" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{clean:.1f}" y2="{clean:.1f}">'
        f"<title>Clean accuracy: {percent(audit.clean)}</title></line>",
        f'<polyline class="line certified" points="{_points(certified)}"/>',
        f'<polyline class="line attacked" points="{_points(attacked)}"/>',
        *_markers(levels, certified, attacked),
        *_budget_axis(levels, [point[0] for point in attacked], audit.threat),
        *_legend(has_proof=audit.settings.get("certify") is not None),
        "</svg>",
    ]
    return "\n".join(parts)


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _summary(audit: Audit) -> str:
    return f"Accuracy against budget. {audit.headline} Clean accuracy {percent(audit.clean)}."


def _grid() -> list[str]:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    lines = [
        f'<text class="axis" transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">accuracy</text>'
    ]
    for step in range(0, 101, 25):
        y = _y(step / 100)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 9}" y="{y + 4.5:.1f}" text-anchor="end">{step} %</text>')
    return lines


def _markers(
    levels: Sequence[Level], certified: Sequence[tuple[float, float]], attacked: Sequence[tuple[float, float]]
) -> list[str]:
    """Squares and circles, so that the curves differ by more than their colour; the text appears under the pointer."""
    shapes = []
    for level, (cx, cy), (ax, ay) in zip(levels[1:], certified[1:], attacked[1:], strict=True):
        of = f"of {level.inputs} inputs at {escape(level.threat)}"
        proved = f"Certified: {level.certified} {of} = {percent(level.certified_accuracy)}"
        proved += f" (95 % interval {interval_text(level.certified_interval)})"
        alive = f"Under attack: {level.attacked} {of} = {percent(level.attacked_accuracy)}"
        alive += f" (95 % interval {interval_text(level.attacked_interval)})"
        square = f'x="{cx - 4.5:.1f}" y="{cy - 4.5:.1f}" width="9" height="9"'
        shapes.append(f'<rect class="mark certified" {square}><title>{proved}</title></rect>')
        shapes.append(
            f'<circle class="mark attacked" cx="{ax:.1f}" cy="{ay:.1f}" r="4.5"><title>{alive}</title></circle>'
        )
    return shapes


def _budget_axis(levels: Sequence[Level], xs: Sequence[float], threat: str) -> list[str]:
    every = -(-len(levels) // _MAX_TICKS)
    ticks = []
    # Counted from the largest budget, which the headline is about and which must have its number.
    for x, level in list(zip(xs, levels, strict=True))[::-1][::every]:
        ticks.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{level.budget:.3g}</text>')
    unit = _UNITS.get(threat.partition(":")[0], threat)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    label = f'<text class="axis" x="{middle:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">budget: {escape(unit)}</text>'
    return [*ticks, label]


def _legend(*, has_proof: bool) -> list[str]:
    y = 20
    items = [
        '<circle class="mark attacked" cx="{x}" cy="20" r="4.5"/>',
        '<rect class="mark certified" x="{x4}" y="15.5" width="9" height="9"/>',
        '<rect class="band" x="{x6}" y="13" width="13" height="13"/>',
        '<line class="clean" x1="{x6}" x2="{x8}" y1="20" y2="20"/>',
    ]
    names = ["under attack", "certified" if has_proof else "certified (not run)", "undecided", "clean"]
    starts = [_LEFT + 8, _LEFT + 134, _LEFT + (238 if has_proof else 300), _LEFT + (346 if has_proof else 408)]
    parts = []
    for item, name, x in zip(items, names, starts, strict=True):
        parts.append(item.format(x=x, x4=x - 4.5, x6=x - 6, x8=x + 12))
        parts.append(f'<text x="{x + (18 if name == "clean" else 12)}" y="{y + 5}">{name}</text>')
    return parts
