"""Shared by all commands: arguments and options, and how to open models and data."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from torch import nn

from holdfast.data import Dataset, load_data
from holdfast.errors import InputError
from holdfast.models import load_model
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


@dataclass(frozen=True)
class Opening:
    """How to read a model file, from options that all commands with a model share; see `opens_model`."""

    architecture: Annotated[
        str | None,
        typer.Option(help="Architecture, if the file holds only weights: small-star, or FILE.py:CLASS of your own."),
    ] = None
    arch_args: Annotated[
        list[str] | None, typer.Option(help="Argument of the architecture: width=16; may be given several times.")
    ] = None
    key: Annotated[str | None, typer.Option(help="Entry of a checkpoint that holds the weights, e.g. model.")] = None
    mean: Annotated[str | None, typer.Option(help="Normalisation that the model was trained with: 0.49,0.48,0.45.")] = (
        None
    )
    std: Annotated[str | None, typer.Option(help="As --mean.")] = None


AS_IT_IS = Opening()


def opens_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Opening`; it gets them as its argument `opening`."""
    shared = inspect.signature(Opening).parameters
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "opening"]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        opening = Opening(**{name: given.pop(name) for name in shared})
        command(**given, opening=opening)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *shared.values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def open_both(model: Path, data: str, opening: Opening, root: Path | None) -> tuple[nn.Module, Dataset]:
    """Load model and data set; the data decide the input shape and the classes of an architecture by name."""
    dataset = load_data(data, root=root)
    architecture, options = opening.architecture, dict(parse_option(text) for text in opening.arch_args or [])
    if architecture is not None and ".py" not in architecture:
        options = {"input_shape": tuple(dataset.test.x.shape[1:]), "classes": len(dataset.classes), **options}
    if architecture is None and options:
        raise InputError("--arch-args are arguments of an --architecture; give that as well")
    mean, std = parse_numbers("--mean", opening.mean), parse_numbers("--std", opening.std)
    how: dict[str, Any] = {"architecture": architecture, "options": options, "key": opening.key}
    return load_model(model, mean=mean, std=std, **how), dataset


def parse_numbers(option: str, text: str | None) -> list[float] | None:
    """Parse numbers between commas, such as 0.49,0.48,0.45."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"cannot read {option} '{text}'; write numbers such as 0.49,0.48,0.45") from None


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
