"""`holdfast data`: data sets, and how to get them."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from holdfast.cli.common import RootOption, SeedOption, may_be_quiet, table
from holdfast.data import download, list_data, load_data
from holdfast.data.corruptions import CORRUPTIONS, corrupt
from holdfast.errors import InputError
from holdfast.utils.files import write_whole

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


@app.command("corrupt")
@may_be_quiet
def data_corrupt(
    name: Annotated[str, typer.Argument(help="Name of a data set (`holdfast data list`) or a path.")],
    corruption: Annotated[str, typer.Option(help=f"One of {', '.join(CORRUPTIONS)}.")],
    out: Annotated[Path, typer.Option(help="File to write, a .npz that --data takes.")],
    severity: Annotated[int, typer.Option(help="1 to 5.")] = 3,
    seed: SeedOption = 0,
    root: RootOption = None,
) -> None:
    """Corrupt the test images of a data set and write them with its training images to a .npz file."""
    if out.suffix != ".npz":
        raise InputError(f"--out: expected a file that ends in .npz, got '{out}'")
    data = load_data(name, root=root)
    shifted = corrupt(data.test.x, corruption, severity, seed=seed)
    arrays: dict[str, Any] = {
        "x_train": data.train.x.numpy(),
        "y_train": data.train.y.numpy(),
        "x_test": shifted.numpy(),
        "y_test": data.test.y.numpy(),
        "classes": np.array(data.classes),
        "layout": np.array("NCHW"),
    }
    write_whole(out, lambda file: np.savez_compressed(file, **arrays), way_out="choose another --out")
    typer.echo(f"{out}: {len(shifted)} test images of {data.name} with {corruption} at severity {severity}")
