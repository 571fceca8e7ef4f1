"""`holdfast serve`: all runs in the browser."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common import AS_IT_IS, DataOption, Opening, RootOption, open_both, opens_model
from holdfast.errors import InputError
from holdfast.serve import Subject, serve

app = typer.Typer(add_completion=False)


@app.command()
@opens_model
def serve_command(
    runs: Annotated[Path, typer.Argument(help="Folder with runs, at any depth; read only.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free port.")] = 8787,
    host: Annotated[
        str, typer.Option(help="Where to listen. Beyond this machine (0.0.0.0) the address carries a token.")
    ] = "127.0.0.1",
    model: Annotated[Path | None, typer.Option(help="A model to try, besides the models of the training runs.")] = None,
    data: DataOption = "mnist-mini",
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Show all runs in the browser, live, and try inputs on a model; stop with Ctrl-C."""
    if opening.architecture is not None and model is None:
        raise InputError("--architecture says what a --model is; give --model as well")
    subject = None if model is None else Subject(model.stem, *open_both(model, data, opening, root))
    serve(runs, host=host, port=port, subject=subject, announce=lambda address: typer.echo(f"open {address}"))
