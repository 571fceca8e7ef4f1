"""Charts of certified training as SVG text: smoothness along a run, paths between models, ReLU states, tightness."""

import math
from collections.abc import Mapping, Sequence

from holdfast.analyze.relu_state import ReluState
from holdfast.analyze.tightness import QUANTILES, Tightness
from holdfast.errors import InputError
from holdfast.utils.panels import line_keys, panel_at, panel_axes, panels_figure
from holdfast.utils.svg import STYLES, inner_rounds

STATES = {"active": "#009e73", "unstable": "#e69f00", "dead": "#56b4e9"}  # Okabe and Ito's, as the lines

# What a row of `smoothness.record` holds: title of its panel, and whether its axis is logarithmic where it can be.
MEASURES = {
    "loss": ("loss; shaded: along the gradient", True),
    "gradient_difference": ("gradient difference", True),
    "cosine_distance": ("cosine distance", False),
    "target_cosine": ("cos(gradient, target's gradient)", False),
    "target_difference": ("target's gradient difference", True),
}


def smoothness_svg(runs: Mapping[str, Sequence[Mapping[str, float]]], *, title: str = "Smoothness") -> str:
    """Each measure over the steps of several runs, a panel for each; a band shows the range of the loss.

    Args:
        runs: rows of `smoothness.record` by name of the run, at most five runs. Measures that some run lacks are left
            out, and so are values that are not finite.
    """
    _check_names(runs)
    rows = [row for run in runs.values() for row in run]
    shown = [key for key in MEASURES if all(key in row for row in rows)]
    if not all(map(len, runs.values())) or not shown:
        raise InputError("each run needs at least one row of smoothness.record")
    steps = [row["step"] for row in rows]
    parts = []
    for i, key in enumerate(shown):
        name, log = MEASURES[key]
        keys = (key, "loss_low", "loss_high") if key == "loss" else (key,)
        values = [row[k] for row in rows for k in keys if math.isfinite(row[k])]
        panel = panel_at(i % 3, i // 3, steps, values, log=log)
        parts += panel_axes(panel, name, "step", inner_rounds(min(steps), max(steps)))
        for (run, at), style in zip(runs.items(), STYLES, strict=False):
            seen = [row for row in at if all(math.isfinite(row[k]) for k in keys)]
            xs = [row["step"] for row in seen]
            if key == "loss":
                edge = panel.points(xs, [row["loss_high"] for row in seen])
                edge += " " + panel.points(xs[::-1], [row["loss_low"] for row in seen[::-1]])
                parts.append(f'<polygon points="{edge}" fill="{style[0]}" fill-opacity="0.2"/>')
            parts.append(panel.line(xs, [row[key] for row in seen], style, run))
    return panels_figure(title, min(len(shown), 3), -(-len(shown) // 3), parts, line_keys(runs))


def path_svg(
    paths: Mapping[str, Sequence[float]], ts: Sequence[float], *, title: str = "Along the path", y_label: str = "loss"
) -> str:
    """Values along one or several curves between two models.

    Args:
        paths: values at each t by name, such as what `connectivity.path_losses` gives; at most five, all finite.
        ts: places on the curve.
        y_label: what the values are.
    """
    _check_names(paths)
    values = [float(value) for path in paths.values() for value in path]
    if not ts or any(len(path) != len(ts) for path in paths.values()) or not all(map(math.isfinite, values)):
        raise InputError(f"each path needs {len(ts)} finite values, one for each t, and at least one")
    panel = panel_at(0, 0, ts, values)
    parts = panel_axes(panel, y_label, "t", inner_rounds(min(ts), max(ts)))
    for (name, path), style in zip(paths.items(), STYLES, strict=False):
        parts.append(panel.line(ts, map(float, path), style, name))
    return panels_figure(title, 1, 1, parts, line_keys(paths))


def lines_svg(
    lines: Mapping[str, Sequence[float]], *, title: str, y_label: str, x_label: str = "epoch", log: bool = False
) -> str:
    """One line for each name over 1, 2, ..., such as a measure over the epochs of several runs.

    Args:
        lines: values by name; at most five lines, each with at least one value, all finite.
        y_label, x_label: what the axes show.
        log: logarithmic vertical axis; all values must then be > 0.
    """
    _check_names(lines)
    values = [value for line in lines.values() for value in line]
    if not all(map(len, lines.values())):
        raise InputError(f"expected lines of which none is empty, got {list(lines)}")
    if not all(map(math.isfinite, values)) or (log and min(values) <= 0):
        raise InputError(f"values must be finite{', and > 0 on a logarithmic axis' if log else ''}")
    steps = max(map(len, lines.values()))
    panel = panel_at(0, 0, (1, steps), values, log=log)
    parts = panel_axes(panel, y_label, x_label, {1: "1", **inner_rounds(1, steps)})
    for (name, line), style in zip(lines.items(), STYLES, strict=False):
        parts.append(panel.line(range(1, len(line) + 1), line, style, name))
    return panels_figure(title, 1, 1, parts, line_keys(lines))


def relu_svg(states: Mapping[float, ReluState], *, title: str = "ReLU states", x_label: str = "budget") -> str:
    """Shares of active, unstable and dead ReLUs as stacked bars, and the slopes of the chords of the unstable ones.

    Args:
        states: what `relu_state` gave for each budget, or after each epoch. Of those with unstable ReLUs the
            histograms of the first, the last and at most three between are drawn.
        x_label: what the keys of `states` are.
    """
    if not states or any(len(state.active) == 0 for state in states.values()):
        raise InputError("expected ReLU states of one input or more, for at least one budget or epoch")
    count = len(states)
    panel = panel_at(0, 0, (0, count), (0.0, 1.0))
    # Room for about eight numbers.
    labels = {i + 0.5: f"{key:g}" for i, key in enumerate(states) if i % -(-count // 8) == 0}
    parts = panel_axes(panel, "share of the ReLUs", x_label, labels)
    for i, state in enumerate(states.values()):
        counts = {name: int(getattr(state, name).sum()) for name in STATES}
        low, total = 0, sum(counts.values())
        for name, colour in STATES.items():
            top, bottom = panel.up((low + counts[name]) / total), panel.up(low / total)
            left, right = panel.across(i + 0.08), panel.across(i + 0.92)
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
                f'fill="{colour}"><title>{name}: {counts[name] / total:.1%}</title></rect>'
            )
            low += counts[name]
    some = [key for key, state in states.items() if int(state.slopes.sum()) > 0]
    few = list(dict.fromkeys(some[round(i * (len(some) - 1) / 4)] for i in range(5))) if some else []
    shares = {key: (states[key].slopes / states[key].slopes.sum()).tolist() for key in few}
    panel = panel_at(1, 0, (0, 1), [0.0, *(share for line in shares.values() for share in line)])
    parts += panel_axes(panel, "share of the unstable ones", "slope of the chord", inner_rounds(0, 1))
    for (key, line), style in zip(shares.items(), STYLES, strict=False):
        xs = [(i + side) / len(line) for i in range(len(line)) for side in (0, 1)]
        parts.append(panel.line(xs, [share for share in line for _ in (0, 1)], style, f"{x_label} {key:g}"))
    boxes = [(name, f'<rect width="14" height="12" y="-10" fill="{colour}"/>') for name, colour in STATES.items()]
    return panels_figure(title, 2, 1, parts, boxes + line_keys([f"{x_label} {key:g}" for key in few]))


def tightness_svg(results: Mapping[str, Tightness], *, title: str = "Tightness (lower is tighter)") -> str:
    """A box for each relaxation and measure: quartiles and median over the inputs, whiskers to the extremes.

    Args:
        results: what `tightness` gave, of one input or more, all finite.
    """
    if not results:
        raise InputError("expected the tightness of at least one relaxation")
    parts, colour = [], STYLES[0][0]
    for column, (measure, name) in enumerate((("total", "sum of the bounds of z_j - z_y"), ("loss", "certified loss"))):
        found = {key: getattr(result, measure).double() for key, result in results.items()}
        for key, values in found.items():
            if len(values) == 0 or not bool(values.isfinite().all()):
                raise InputError(f"the bounds of '{key}' must be finite and of at least one input")
        boxes = [[float(values.quantile(q)) for q in QUANTILES.values()] for values in found.values()]
        panel = panel_at(column, 0, (0, len(found)), [value for box in boxes for value in box])
        parts += panel_axes(panel, name, "", {i + 0.5: key for i, key in enumerate(found)})
        for i, box in enumerate(boxes):
            low, first, median, third, high = map(panel.up, box)
            left, middle, right = (panel.across(i + share) for share in (0.25, 0.5, 0.75))
            parts.append(
                f'<g stroke="{colour}" stroke-width="2"><line x1="{middle:.1f}" x2="{middle:.1f}" y1="{low:.1f}" '
                f'y2="{high:.1f}"/><rect x="{left:.1f}" y="{third:.1f}" width="{right - left:.1f}" '
                f'height="{first - third:.1f}" fill="#cfe3f1"/><line x1="{left:.1f}" x2="{right:.1f}" '
                f'y1="{median:.1f}" y2="{median:.1f}"/></g>'
            )
    return panels_figure(title, 2, 1, parts, [])


def _check_names(lines: Mapping[str, object]) -> None:
    if not 1 <= len(lines) <= len(STYLES):
        raise InputError(f"expected 1 to {len(STYLES)} lines, which differ in colour and dashes, got {list(lines)}")
