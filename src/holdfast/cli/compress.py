"""`holdfast compress`: a pruned or binary network in a file of few bytes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.common import AS_IT_IS, Opening, open_alone, opens_model, table
from holdfast.errors import InputError, StorageError
from holdfast.models import get_architecture
from holdfast.models.compact import Compact, save_compact
from holdfast.training import folder as files

app = typer.Typer(add_completion=False)
console = Console()


@app.command()
@opens_model
def compress(
    model: Annotated[Path, typer.Argument(help="Folder of a training that prunes, or its model.safetensors.")],
    out: Annotated[
        Path | None, typer.Option(help="The compact file; beside the model, as NAME.compact.safetensors, if not given.")
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option(help="Also write the network with ordinary weights: a .onnx file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    opening: Opening = AS_IT_IS,
) -> None:
    """Write a pruned or binary network to a compact file: places and signs of the weights, bit for bit.

    Every command reads the file like any other model.
    """
    source = model / files.MODEL if model.is_dir() else model
    if model.is_dir() and not source.is_file():
        raise StorageError(f"there is no finished model in the folder '{model}'; it would be {source}")
    target = out or source.with_name(f"{source.name.removesuffix('.safetensors')}.compact.safetensors")
    for path in (target, onnx):
        if path is not None and path.exists() and (not force or path.resolve() == source.resolve()):
            raise InputError(f"'{path}' exists already; choose another name, or overwrite it with --force")
    network = open_alone(source, opening)
    shown = save_compact(network, target)
    console.print(summary(shown))
    typer.echo(
        f"{shown.kept:,} of {shown.weights:,} weights ({shown.kept / shown.weights:.2%}), "
        f"{8 * shown.size / shown.kept:.1f} bits each with all the rest; {shown.size:,} bytes instead of "
        f"{shown.dense:,}: {shown.ratio:.0f} times smaller"
    )
    typer.echo(f"model: {target}")
    if onnx is not None:
        from holdfast.models.onnx.write import write_onnx

        made = get_architecture(network)
        if made is None:
            raise InputError("--onnx needs the shape of an input, which the file does not say; export it in Python")
        typer.echo(f"onnx: {write_onnx(network, onnx, made[1]['input_shape'])}")


def summary(shown: Compact) -> Table:
    """Bytes of each packed tensor."""
    rows = [[name, f"{dense:,}", f"{size:,}", f"{dense / size:.0f}"] for name, (size, dense) in shown.tensors.items()]
    return table(["tensor", "bytes in memory", "bytes in the file", "times smaller"], rows)
