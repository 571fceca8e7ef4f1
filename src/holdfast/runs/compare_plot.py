"""What a comparison says and how it looks: accuracies with their intervals, tables, and one plot."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from holdfast.audits.bracket import interval_text, percent
from holdfast.audits.report.markdown import plain
from holdfast.audits.report.page import duration
from holdfast.utils.files import csv_text, write_text
from holdfast.utils.intervals import clopper_pearson, medals
from holdfast.utils.show import Svg, data_frame, html_table, latex_table, lines

JSON_VERSION = 1
STEPS = 40  # of PGD
FILES = ("compare.json", "compare.csv", "compare.md", "compare.svg")
_GAP_TEXT = "Robust gap: highest minus last robust accuracy on the validation split, in points."
_MEDALS_TEXT = (
    "Gold: the highest of its column; silver: within two standard errors, sqrt(0.25 / n) each, of it, so that the "
    "inputs do not tell them apart."
)

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 196, 74, 84, 52
_BAR, _GAP, _MOST = 15, 20, 24  # height of a bar, space between runs, characters of a name
# The colours of the report; the three differ in lightness too, and each bar has its number beside it.
_STYLE = """<style>
svg { --card: #ffffff; --ink: #1b2130; --soft: #5b6475; --line: #e2e5eb; --clean: #8d97a8; --pgd: #0068a8;
  --attack: #c44f00; background: var(--card); font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --card: #1b202a; --ink: #e8ebf2; --soft: #9aa4b6; --line: #2e3542; --clean: #717b8e; --pgd: #62b8f0;
    --attack: #f0a04b; }
}
text { fill: var(--soft); font-size: 13px; } .name, .heading { fill: var(--ink); } .heading { font-size: 15px; }
.grid { stroke: var(--line); } .bar.clean { fill: var(--clean); } .bar.pgd { fill: var(--pgd); }
.bar.attack { fill: var(--attack); } .halo { stroke: var(--card); stroke-width: 5; }
.interval { stroke: var(--ink); stroke-width: 1.6; }
</style>"""


@dataclass(frozen=True)
class Score:
    """How many of the inputs are classified right, as they are or whatever an attack did to them."""

    right: int
    inputs: int

    @property
    def accuracy(self) -> float:
        return self.right / self.inputs

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper and Pearson's 95 % interval of the accuracy on all inputs of this kind."""
        return clopper_pearson(self.right, self.inputs)


@dataclass(frozen=True)
class Row:
    """One run."""

    name: str  # name of its folder
    folder: str
    method: str  # objective, attack and regularisers, as the recipe says
    scores: Mapping[str, Score]  # by "clean", "pgd" and, unless there was none, the name of the second attack
    seconds: float  # training time
    images_per_second: float | None  # over all of the training
    peak_memory_mb: float | None  # the highest of all epochs; None where the run did not measure it
    best_epoch: int  # the epoch whose weights were kept, from 1
    epochs: int
    robust_gap: float | None  # highest minus last robust accuracy on the validation split; None without one
    key: str  # decides the stored results: model file, inputs, threat and attacks


@dataclass(frozen=True, repr=False)
class Comparison:
    """Rows in the order of the runs, and what they were all judged by."""

    rows: tuple[Row, ...]
    data: str
    threat: str
    attack: str
    inputs: int
    settings: Mapping[str, Any]

    @property
    def heading(self) -> str:
        """What was measured."""
        what = f"Accuracy on {self.inputs} test inputs of {self.data} at {self.threat}"
        return f"{what}, with 95 % Clopper-Pearson intervals"

    @property
    def header(self) -> list[str]:
        """The columns as they are shown."""
        scores = [_label(name) for name in self.rows[0].scores]
        return ["run", "method", *scores, "training", "images/s", "peak MB", "best epoch", "robust gap"]

    def table(self) -> Table:
        """For the terminal: two lines for each run, so that all columns fit into 80 characters."""
        table = Table(title=self.heading, caption=_GAP_TEXT, box=None, pad_edge=False, header_style="bold")
        run, method, *scores, time, speed, memory, epoch, gap = self.header
        table.add_column(f"{run}\n{method}", overflow="fold")
        for column in (*scores, f"{time}\n{speed}", memory.replace(" ", "\n"), f"{epoch}\n{gap}"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            shown = [f"{percent(score.accuracy)}\n{_ends(score)}" for score in row.scores.values()]
            time, speed, memory, epoch, gap = _cells(row)
            cells = [f"{row.name}\n{row.method}", *shown, f"{time}\n{speed}", memory, f"{epoch}\n{gap}"]
            table.add_row(*map(Text, cells))  # as Text: a name may hold brackets, which are markup in a plain string
        return table

    def to_markdown(self) -> str:
        """A heading that says what was measured, and the table."""
        rows = [self.header, ["---"] * 2 + ["---:"] * (len(self.header) - 2)]
        rows += [[plain(cell) for cell in row] for row in self._texts()]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return f"{plain(self.heading)}.\n\n{table}\n\n{self.notes}\n"

    def to_csv(self) -> str:
        """One line per run; accuracies as shares, each with the ends of its interval."""
        rows = [_figures(row) for row in self.rows]
        return csv_text([list(rows[0]), *(list(row.values()) for row in rows)])

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with one row per run and the columns of the CSV file."""
        return data_frame([_figures(row) for row in self.rows])

    def to_latex(self) -> str:
        """Return the table as LaTeX, in the style of booktabs."""
        return latex_table(f"{self.heading}. {self.notes}", self.header, self._texts())

    def __repr__(self) -> str:
        return lines(f"Comparison: {self.heading}", {row.name: _answers(row) for row in self.rows})

    def _repr_html_(self) -> str:
        return self.plot()._repr_html_() + html_table(self.heading, self.header, self._texts())

    def plot(self) -> Svg:
        """Draw the accuracies with their intervals, for each run."""
        return Svg(self.to_svg(), self.heading)

    def _texts(self) -> list[list[str]]:
        """The cells of each row as text."""
        rows, won = [], {name: self.medals(name) for name in self.rows[0].scores}
        for i, row in enumerate(self.rows):
            scores = [
                f"{percent(score.accuracy)} ({interval_text(score.interval)}) {won[name][i]}".rstrip()
                for name, score in row.scores.items()
            ]
            rows.append([row.name, row.method, *scores, *_cells(row)])
        return rows

    def medals(self, name: str) -> list[str]:
        """For each run "gold", "silver" or "" by the accuracy `name`; nothing is won against nobody."""
        scores = [row.scores[name] for row in self.rows]
        if len(scores) < 2:
            return [""] * len(scores)
        return medals([score.accuracy for score in scores], self.inputs)

    @property
    def notes(self) -> str:
        """What the columns mean, below the table."""
        return _GAP_TEXT if len(self.rows) < 2 else f"{_GAP_TEXT} {_MEDALS_TEXT}"

    def to_svg(self) -> str:
        """The plot: horizontal bars, a group for each run, so that long names and any number of runs have room."""
        names = list(self.rows[0].scores)
        group = _BAR * len(names) + _GAP
        bottom = _TOP + group * len(self.rows)
        summary = " ".join(f"{row.name}: {_answers(row)}." for row in self.rows)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + _BOTTOM}" role="img" '
            'aria-labelledby="title summary">',
            f'<title id="title">{escape(self.heading)}</title>',
            f'<desc id="summary">{escape(summary)}</desc>',
            _STYLE,
            f'<text class="heading" x="16" y="28">{escape(self.heading)}</text>',
            *_legend(names),
            *_axis(bottom),
        ]
        for i, row in enumerate(self.rows):
            parts += _group(row, _TOP + i * group + _GAP / 2)
        return "\n".join([*parts, "</svg>"]) + "\n"

    def to_json(self) -> str:
        """Everything; docs/compare.md lists the keys."""
        rows = []
        for row in self.rows:
            scores = {
                name: {**asdict(score), "accuracy": score.accuracy, "interval": score.interval}
                for name, score in row.scores.items()
            }
            rows.append({**asdict(row), "scores": scores})
        about = {key: getattr(self, key) for key in ("data", "threat", "attack", "inputs", "settings")}
        body = {"schema_version": JSON_VERSION, **about, "rows": rows}
        return json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n"

    def save(self, folder: str | Path) -> Path:
        """Write `compare.json`, `.csv`, `.md` and `.svg` into `folder`, replacing older ones; return the folder."""
        for name, text in zip(FILES, (self.to_json(), self.to_csv(), self.to_markdown(), self.to_svg()), strict=True):
            write_text(Path(folder) / name, text)
        return Path(folder)


def _answers(row: Row) -> str:
    """The accuracies of a run on one line."""
    return ", ".join(f"{_label(name)} {percent(score.accuracy)}" for name, score in row.scores.items())


def _figures(row: Row) -> dict[str, object]:
    """Name, method and every figure of a run; accuracies as shares, each with the ends of its interval."""
    figures: dict[str, object] = {key: getattr(row, key) for key in ("name", "folder", "method")}
    for name, score in row.scores.items():
        low, high = score.interval
        figures |= {name: score.accuracy, f"{name}_low": low, f"{name}_high": high}
    others = ("seconds", "images_per_second", "peak_memory_mb", "best_epoch", "epochs", "robust_gap")
    return figures | {key: getattr(row, key) for key in others}


def _cells(row: Row) -> list[str]:
    """The columns after the scores, as text; empty where a run does not know."""
    speed, memory, gap = row.images_per_second, row.peak_memory_mb, row.robust_gap
    return [
        duration(row.seconds),
        "" if speed is None else f"{speed:,.0f}",
        "" if memory is None else f"{memory:,.0f}",
        f"{row.best_epoch}/{row.epochs}",
        "" if gap is None else f"{100 * gap:.1f}",
    ]


def _ends(score: Score) -> str:
    low, high = score.interval
    return f"{100 * low:.1f}-{100 * high:.1f}"


def _x(share: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share


def _label(name: str) -> str:
    return {"pgd": f"PGD-{STEPS}", "autoattack": "AutoAttack", "apgd-ce-dlr": "APGD-CE+DLR"}.get(name, name)


def _kind(name: str) -> str:
    return name if name in ("clean", "pgd") else "attack"


def _legend(names: list[str]) -> list[str]:
    parts = []
    for i, name in enumerate(names):
        x = _LEFT + 116 * i
        parts.append(f'<rect class="bar {_kind(name)}" x="{x}" y="49" width="13" height="13"/>')
        parts.append(f'<text x="{x + 20}" y="60">{_label(name)}</text>')
    return parts


def _axis(bottom: int) -> list[str]:
    middle = (_x(0) + _x(1)) / 2
    parts = [f'<text class="name" x="{middle:.0f}" y="{bottom + 40}" text-anchor="middle">accuracy</text>']
    for step in range(0, 101, 25):
        x = f"{_x(step / 100):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{step} %</text>')
    return parts


def _group(row: Row, top: float) -> list[str]:
    """The bars of one run with their intervals and numbers; the whole sentence appears under the pointer."""
    middle = top + _BAR * len(row.scores) / 2
    name = row.name if len(row.name) <= _MOST else f"{row.name[: _MOST - 1]}…"
    title = f"<title>{escape(f'{row.name}: {row.method}')}</title>"
    label = f'x="{_LEFT - 12}" y="{middle + 4.5:.1f}" text-anchor="end"'
    parts = [f'<text class="name" {label}>{escape(name)}{title}</text>']
    for i, (key, score) in enumerate(row.scores.items()):
        y = top + i * _BAR
        low, high = (f"{_x(end):.1f}" for end in score.interval)
        centre = f"{y + _BAR / 2 - 0.5:.1f}"
        text = f"{row.name}, {_label(key)}: {score.right} of {score.inputs} = {percent(score.accuracy)}"
        text += f" (95 % interval {interval_text(score.interval)})"
        bar = f'x="{_LEFT}" y="{y:.1f}" width="{_x(score.accuracy) - _LEFT:.1f}" height="{_BAR - 1}"'
        parts.append(f'<g><title>{escape(text)}</title><rect class="bar {_kind(key)}" {bar}/>')
        line = f'x1="{low}" x2="{high}" y1="{centre}" y2="{centre}"'
        parts += [f'<line class="{kind}" {line}/>' for kind in ("halo", "interval")]
        place = f'x="{_x(score.interval[1]) + 8:.1f}" y="{y + 11.5:.1f}"'
        parts.append(f"<text {place}>{percent(score.accuracy)}</text></g>")
    return parts
