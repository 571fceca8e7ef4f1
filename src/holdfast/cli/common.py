"""Shared by all commands: arguments and options, and how to open models and data."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from torch import nn

from holdfast.data import Dataset, load_data
from holdfast.errors import InputError
from holdfast.models import load_model, make_model
from holdfast.training import parse_override

ModelArgument = Annotated[Path, typer.Argument(help="Model file: .safetensors, .onnx, or .pt with --architecture.")]
DataOption = Annotated[str, typer.Option("--data", help="Name of a data set (`holdfast data list`) or a path.")]
THREATS = "Such as linf:8/255, l2:0.5, l1:10, patch:5x5, sparse:10."
ThreatOption = Annotated[str, typer.Option("--threat", help=THREATS)]
SeedOption = Annotated[int, typer.Option("--seed", help="Fixes every random choice.")]
RootOption = Annotated[
    Path | None, typer.Option("--root", help="Folder with data files; the cache folder if not given.")
]
ArchitectureOption = Annotated[
    str | None, typer.Option(help="Architecture, if the file holds only weights, e.g. small-star.")
]


def open_both(model: Path, data: str, architecture: str | None, root: Path | None) -> tuple[nn.Module, Dataset]:
    """Load model and data set; `architecture` is for files that hold only weights. The data decide its shape."""
    dataset = load_data(data, root=root)
    if architecture is None:
        return load_model(model), dataset
    shape, classes = tuple(dataset.test.x.shape[1:]), len(dataset.classes)
    return load_model(model, make_model(architecture, input_shape=shape, classes=classes)), dataset


def run_folder(*words: str) -> Path:
    """Return the default folder of a run."""
    return Path("runs") / "-".join(words).replace(":", "-").replace("/", "_")


def parse_option(text: str) -> tuple[str, Any]:
    """Parse `name=value`, an option of a method."""
    try:
        return parse_override(text)
    except InputError:
        raise InputError(f"cannot read the option '{text}'; write name=value, such as steps=20") from None


def table(columns: list[str], rows: list[list[str]]) -> Table:
    """Rows under a heading, without lines."""
    named = [Column(name, no_wrap=name == "name") for name in columns]
    shown = Table(*named, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        shown.add_row(*row)
    return shown
