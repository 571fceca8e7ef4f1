"""Shared by all commands: arguments and options, and how to open models and data."""

from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from holdfast.data import Dataset, load_data
from holdfast.models import load_model, make_model

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
