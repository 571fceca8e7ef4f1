"""`holdfast models`: the architectures."""

import typer
from rich.console import Console

from holdfast.cli.common import table
from holdfast.models import list_models

app = typer.Typer(add_completion=False)
console = Console()


@app.command()
def models() -> None:
    """List the architectures that `make_model` and recipes know."""
    rows = [[m.name, f"{m.parameters:,}", m.summary] for m in list_models()]
    console.print(table(["name", "parameters", "what it is"], rows))
