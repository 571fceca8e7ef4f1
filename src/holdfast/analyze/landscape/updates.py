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
Lines = dict[str, tuple[Sequence[int], Sequence[float]]]
WINDOW = 500
"""Updates at the start and at the end that are looked at."""
_DRAWN = ("gradient_norm", "distance", "dead")
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
    numbered = [(name, i, row) for name, rows in read.items() for i, row in enumerate(rows, 1)]
    table = [(name, i, *(row.get(key, "") for key in columns)) for name, i, row in numbered]
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
    norms, moved, dead = ({name: _column(rows, key) for name, rows in runs.items()} for key in _DRAWN)
    panels: dict[str, Lines] = {
        f"gradient norm, first {window}": {n: _line(v, 0, min(window, len(v))) for n, v in norms.items()},
        f"gradient norm, last {window}": {n: _line(v, max(0, len(v) - window), len(v)) for n, v in norms.items()},
        "distance from the start": {n: _line(v, 0, len(v)) for n, v in moved.items()},
        "dead layers": {n: _line(v, 0, len(v)) for n, v in dead.items()},
    }
    parts = []
    for i, (name, lines) in enumerate(panels.items()):
        places = [at for xs, _ in lines.values() for at in xs]
        first, last = min(places), max(max(places), min(places) + 1)
        values = [v for _, ys in lines.values() for v in ys]
        panel = panel_at(i % 2, i // 2, (first, last), values, log=i < 2)
        parts += panel_axes(panel, name, "update", inner_rounds(first, last))
        parts += [panel.line(*line, style, run) for (run, line), style in zip(lines.items(), STYLES, strict=False)]
    return panels_figure(title, 2, 2, parts, line_keys(runs))


def _column(rows: Rows, key: str) -> list[float]:
    """One column as numbers; of the dead layers, how many there are."""
    return [float(len(str(row[key]).split())) if key == "dead" else float(row[key]) for row in rows]


def _line(values: Sequence[float], start: int, end: int) -> tuple[Sequence[int], Sequence[float]]:
    """The updates from `start` to `end`, counted from 1, and their values; thinned out where there are many."""
    every = -(-(end - start) // _POINTS)
    return range(start + 1, end + 1, every), values[start:end:every]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
