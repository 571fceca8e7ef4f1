"""What the commands of `holdfast analyze` share: a table on the screen, and the same numbers in a file."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.common import table
from holdfast.runs.certify_run import Row, write_rows

console = Console()
ReportOption = Annotated[Path | None, typer.Option("--out", help="The same numbers: a .csv or .json file.")]


def show(columns: list[str], rows: list[Row], out: Path | None) -> None:
    """Print the rows, and write them if asked to."""
    console.print(table(columns, [[_text(row[name]) for name in columns] for row in rows]))
    keep(rows, out)


def keep(rows: list[Row], out: Path | None) -> None:
    """Write the rows if asked to."""
    if out is not None:
        write_rows(out, rows)
        typer.echo(f"results: {out}")


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
