"""The start and the end of a training from the log of its updates: slow escapes, gradients that stay, dead layers.

Large budgets make the first gradients small and the last ones large, and a whole layer may die (Liu, "Towards
verifiable, generalizable and efficient robust deep neural networks", 2022, Section 4.2.2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InputError
from holdfast.training.logs import read_updates
from holdfast.utils.files import write_csv, write_text
from holdfast.utils.panels import line_keys, panel_at, panel_axes, panels_figure
from holdfast.utils.svg import STYLES, inner_rounds

Rows = Sequence[Mapping[str, float | str]]
WINDOW = 500
"""Updates at the start and at the end that are looked at."""
_POINTS = 1000  # of a line in a picture; more are thinned out


@dataclass(frozen=True)
class Course:
    """A training in five figures.

    Attributes:
        updates: number of updates.
        first, last: mean norm of the gradient over the first and the last `window` updates.
        distance: |theta - theta_0| at the end.
        dead: update after which some layer was dead for the first time, or None; `layers` are its names then.
    """

    updates: int
    first: float
    last: float
    distance: float
    dead: int | None
    layers: tuple[str, ...]


def course(rows: Rows, *, window: int = WINDOW) -> Course:
    """The start and the end of a training; `rows` are what `training.logs.read_updates` gives."""
    if not rows or window < 1:
        raise InputError(f"expected at least one update and a window >= 1, got {len(rows)} and {window}")
    norms = [float(row["gradient_norm"]) for row in rows]
    dead = next((i for i, row in enumerate(rows) if row["dead"]), None)
    return Course(
        updates=len(rows),
        first=_mean(norms[:window]),
        last=_mean(norms[-window:]),
        distance=float(rows[-1]["distance"]),
        dead=None if dead is None else dead + 1,
        layers=() if dead is None else tuple(str(rows[dead]["dead"]).split()),
    )


def write_updates(runs: Mapping[str, Path], folder: Path) -> dict[str, Course]:
    """Write updates.csv and updates.svg of one or several runs with a log, by name; returns the course of each."""
    read = {name: read_updates(run) for name, run in runs.items()}
    columns = list(dict.fromkeys(key for rows in read.values() for key in rows[0]))
    table = [[name, i, *(row.get(key, "") for key in columns)] for name, rows in read.items() for i, row in _each(rows)]
    write_csv(folder / "updates.csv", [("run", "update", *columns), *table])
    write_text(folder / "updates.svg", updates_svg(read))
    return {name: course(rows) for name, rows in read.items()}


def updates_svg(runs: Mapping[str, Rows], *, window: int = WINDOW, title: str = "Updates of the training") -> str:
    """Four panels: gradient norms at the start and at the end, distance from the start, and dead layers.

    Args:
        runs: rows of `read_updates` by name of the run, at most five runs.
        window: updates in the first two panels.
    """
    if not 1 <= len(runs) <= len(STYLES) or not all(map(len, runs.values())):
        raise InputError(f"expected 1 to {len(STYLES)} runs with at least one update each, got {list(runs)}")
    longest = max(map(len, runs.values()))
    norms = {name: [float(row["gradient_norm"]) for row in rows] for name, rows in runs.items()}
    ends = {name: range(max(1, len(v) - window + 1), len(v) + 1) for name, v in norms.items()}
    whole = {name: range(1, len(v) + 1) for name, v in norms.items()}
    panels = (
        (f"gradient norm, first {window}", {n: (range(1, len(v[:window]) + 1), v[:window]) for n, v in norms.items()}),
        (f"gradient norm, last {window}", {n: (ends[n], v[-window:]) for n, v in norms.items()}),
        ("distance from the start", {n: (whole[n], [float(r["distance"]) for r in rows]) for n, rows in runs.items()}),
        ("dead layers", {n: (whole[n], [len(str(r["dead"]).split()) for r in rows]) for n, rows in runs.items()}),
    )
    parts = []
    for i, (name, lines) in enumerate(panels):
        xs, ys = ([v for line in lines.values() for v in line[axis]] for axis in (0, 1))
        panel = panel_at(i % 2, i // 2, (min(xs), max(max(xs), min(xs) + 1)), ys, log=i < 2)
        parts += panel_axes(panel, name, "update", inner_rounds(min(xs), max(max(xs), min(xs) + 1)))
        for (run, (at, values)), style in zip(lines.items(), STYLES, strict=False):
            thin = slice(None, None, -(-longest // _POINTS))
            parts.append(panel.line(list(at)[thin], list(values)[thin], style, run))
    return panels_figure(title, 2, 2, parts, line_keys(runs))


def _each(rows: Rows) -> list[tuple[int, Mapping[str, float | str]]]:
    return list(enumerate(rows, 1))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
