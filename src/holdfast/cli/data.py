"""`holdfast data`: data sets, and how to get them."""

from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.common import RootOption, may_be_quiet, table
from holdfast.data import download, list_data

app = typer.Typer(add_completion=False, help="Data sets: what there is, and how to get it.", no_args_is_help=True)
console = Console()


@app.command("list")
def data_list(root: RootOption = None) -> None:
    """List the data sets, and which of them are on this machine."""
    rows = [
        [d.name, d.summary, f"{d.size / 1e6:.0f} MB" if d.size else "-", d.license, "yes" if d.present else "no"]
        for d in list_data(root=root)
    ]
    console.print(table(["name", "what it is", "size", "license", "here"], rows))


@app.command("get")
@may_be_quiet
def data_get(
    name: Annotated[str, typer.Argument(help="Name of the data set.")],
    root: RootOption = None,
    mirror: Annotated[
        str | None, typer.Option(help="Base address to fetch from instead of the canonical host.")
    ] = None,
) -> None:
    """Download a data set from its canonical host, resuming unfinished files and checking every checksum."""
    typer.echo(f"{name}: {download(name, root=root, mirror=mirror)}")
