"""An audit outside its report: a notebook's cell, a picture of its own, a data frame, a table for a paper."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from holdfast.audits.bracket import Bracket, Level, percent
from holdfast.audits.report.plot import bracket_plot
from holdfast.utils.show import Svg, data_frame, html_table, latex_table, lines

if TYPE_CHECKING:
    from holdfast.audits.result import Audit

# A picture outside a page needs its own colours; these are the colours of the report.
_STYLE = """<style>
svg { --card: #ffffff; --ink: #1b2130; --soft: #5b6475; --line: #e2e5eb; --attacked: #c44f00; --certified: #0068a8;
  background: var(--card); font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --card: #1b202a; --ink: #e8ebf2; --soft: #9aa4b6; --line: #2e3542; --attacked: #f0a04b; --certified: #62b8f0; }
}
text { fill: var(--soft); font-size: 14px; } .axis { fill: var(--ink); } line.grid { stroke: var(--line); }
.band { fill: var(--certified); fill-opacity: .14; } .clean { stroke: var(--soft); stroke-width: 1.8;
  stroke-dasharray: 6 5; }
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round; } .mark { stroke: var(--card); stroke-width: 1.5; }
.line.attacked { stroke: var(--attacked); } .mark.attacked { fill: var(--attacked); }
.line.certified { stroke: var(--certified); } .mark.certified { fill: var(--certified); }
</style>"""


def picture(bracket: Bracket) -> Svg:
    """Draw the bracket as a separate SVG file."""
    opening, rest = bracket_plot(bracket).split(">", 1)
    return Svg(f'{opening} xmlns="http://www.w3.org/2000/svg">\n{_STYLE}{rest}\n', bracket.headline)


def text(audit: "Audit") -> str:
    """The answer, and for each threat the two ends of the bracket at its largest budget."""
    ends = {b.threat: f"{b.answer}; {percent(b.clean)} right unchanged" for b in audit.brackets}
    about = {"model": audit.name, "data": audit.data, **ends}
    return lines(f"Audit: {audit.headline}", about | ({"attack": audit.verdict.level} if audit.verdict else {}))


def html(audit: "Audit") -> str:
    """Picture and table of every threat."""
    pairs = zip(audit.brackets, _tables(audit), strict=True)
    return "".join(picture(bracket)._repr_html_() + html_table(*table) for bracket, table in pairs)


def latex(audit: "Audit") -> str:
    """One table for each threat."""
    about = f"Model {audit.name} on {audit.data}, with 95 % Clopper-Pearson intervals."
    return "\n".join(latex_table(f"{title} {about}", columns, rows) for title, columns, rows in _tables(audit))


def frame(audit: "Audit", per: Literal["budget", "input"]) -> Any:
    """One row for each threat and budget, or for each threat and input."""
    if per == "budget":
        return data_frame([_figures(bracket, level) for bracket in audit.brackets for level in bracket.levels])
    return data_frame(
        [
            {"threat": b.threat, **asdict(record), **{name: values[i] for name, values in audit.groups.items()}}
            for b in audit.brackets
            for i, record in enumerate(b.records)
        ]
    )


def _tables(audit: "Audit") -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows of each table that the terminal shows."""
    tables = [part for part in audit.table().renderables if isinstance(part, Table)]
    return [
        (str(table.title), [str(c.header) for c in table.columns], [list(map(str, row)) for row in _rows(table)])
        for table in tables
    ]


def _rows(table: Table) -> Iterable[tuple[object, ...]]:
    return zip(*(column.cells for column in table.columns), strict=True)


def _figures(bracket: Bracket, level: Level) -> dict[str, object]:
    figures: dict[str, object] = {"threat": bracket.threat, "budget": level.budget, "inputs": level.inputs}
    for kind in ("certified", "attacked"):
        low, high = getattr(level, f"{kind}_interval")
        figures |= {kind: getattr(level, f"{kind}_accuracy"), f"{kind}_low": low, f"{kind}_high": high}
    return figures | {"undecided": level.attacked - level.certified}
