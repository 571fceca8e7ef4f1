"""`holdfast report`: several audits on one page."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast.audits import load_audit, render
from holdfast.errors import StorageError

app = typer.Typer(add_completion=False)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished audits.")],
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
) -> None:
    """Write one page that compares several audits."""
    page = render([load_audit(run) for run in runs])
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}") from error
    typer.echo(f"report: {out}")
