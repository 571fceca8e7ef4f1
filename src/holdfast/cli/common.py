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

from holdfast.checks import check_logits
from holdfast.data import Dataset, load_data
from holdfast.errors import InputError, StorageError
from holdfast.models import load_model
from holdfast.training import parse_override
from holdfast.utils.progress import without_progress

ModelArgument = Annotated[Path, typer.Argument(help="Model file: .safetensors, .onnx, or .pt with --architecture.")]
DataOption = Annotated[str, typer.Option("--data", help="Name of a data set (`holdfast data list`) or a path.")]
THREATS = "Such as linf:8/255, l2:0.5, l1:10, patch:5x5, patch:diamond:13, sparse:10."
ThreatOption = Annotated[str, typer.Option("--threat", help=THREATS)]
InputsOption = Annotated[
    int, typer.Option("--n", "-n", min=1, help="Number of test inputs, drawn with the classes balanced.")
]
OldInputsOption = Annotated[int | None, typer.Option("--inputs", min=1, hidden=True)]
"""What `--n` was called at first in some commands."""
OldCopiesOption = Annotated[int | None, typer.Option("--n", min=1, hidden=True)]
"""What `--samples` was called at first where no inputs are counted."""
MethodOptions = Annotated[list[str] | None, typer.Option("--option", help="Option of the method: name=value.")]
TableOption = Annotated[Path | None, typer.Option("--out", help="Results of each input: a .csv or .json file.")]
NormOption = Annotated[str, typer.Option("--norm", help="linf, l2 or l1.")]
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

    @property
    def words(self) -> list[str]:
        """The options as they stand on a command line."""
        given = [(f"--{name.replace('_', '-')}", value) for name, value in vars(self).items()]
        pairs = [(name, one) for name, value in given for one in (value if isinstance(value, list) else [value])]
        return [word for name, one in pairs if one is not None for word in (name, str(one))]


AS_IT_IS = Opening()


def opens_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Opening`; it gets them as its argument `opening`."""
    shared = inspect.signature(Opening).parameters
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "opening"]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        opening = Opening(**{name: given.pop(name) for name in shared})
        command(**given, opening=opening)

    return _with_parameters(run, [*own, *shared.values()])


def may_be_quiet(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option --quiet, with which it shows no progress."""
    kind = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
    quiet = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)

    @functools.wraps(command)
    def run(*, quiet: bool, **given: Any) -> None:
        with without_progress(quiet):
            command(**given)

    return _with_parameters(run, [*inspect.signature(command).parameters.values(), quiet])


def _with_parameters(run: Callable[..., None], given: list[inspect.Parameter]) -> Callable[..., None]:
    """The function with the signature that Typer is to read."""
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in given]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def open_both(model: Path, data: str, opening: Opening, root: Path | None) -> tuple[nn.Module, Dataset]:
    """Load model and data set; the data decide the input shape and the classes of an architecture by name."""
    dataset = load_data(data, root=root)
    network = open_alone(model, opening, dataset)
    _note_classes(network, dataset)
    return network, dataset


def open_alone(model: Path, opening: Opening, dataset: Dataset | None = None) -> nn.Module:
    """Load a model; without a data set, an architecture by name has its own input shape and classes."""
    architecture, options = opening.architecture, dict(parse_option(text) for text in opening.arch_args or [])
    if dataset is not None and architecture is not None and ".py" not in architecture:
        options = {"input_shape": tuple(dataset.test.x.shape[1:]), "classes": len(dataset.classes), **options}
    if architecture is None and options:
        raise InputError("--arch-args are arguments of an --architecture; give that as well")
    mean, std = parse_numbers("--mean", opening.mean), parse_numbers("--std", opening.std)
    _check_normalisation(mean, std, dataset)
    how: dict[str, Any] = {"architecture": architecture, "options": options, "key": opening.key}
    return load_model(model, mean=mean, std=std, **how)


def _note_classes(network: nn.Module, dataset: Dataset) -> None:
    """Say how named classes are numbered where the model has more: a set of some of its classes needs its numbers."""
    names = dataset.classes
    if names == tuple(str(i) for i in range(len(names))):
        return
    try:
        scores = check_logits(network, dataset.test.x[:8]).shape[1]
    except InputError:  # refused later, by the command itself and with what else it finds
        return
    if scores > len(names):
        typer.echo(
            f"note: {dataset.name} has {len(names)} classes, the model {scores}; '{names[0]}' counts as its class 0, "
            "and so on by name. If the model numbers them otherwise, list the images in a CSV file with its numbers.",
            err=True,
        )


def _check_normalisation(mean: list[float] | None, std: list[float] | None, dataset: Dataset | None) -> None:
    """Refuse half of a normalisation, which would give wrong numbers, and one for another number of channels."""
    if (mean is None) != (std is None):
        raise InputError("give --mean and --std together; --mean 0 or --std 1 changes nothing")
    if dataset is None:
        return
    channels = dataset.test.x.shape[1]
    for option, values in (("--mean", mean), ("--std", std)):
        if values is not None and len(values) not in (1, channels):
            raise InputError(f"{option} has {len(values)} values; number of channels of the inputs: {channels}")


def check_table(out: Path | None) -> None:
    """Refuse, before the work, a file of results that could not be written after it."""
    if out is None:
        return
    if out.suffix not in (".csv", ".json"):
        raise InputError(f"--out must end in .csv or .json, got '{out}'")
    if not out.parent.is_dir():
        raise StorageError(f"cannot write {out}: there is no folder '{out.parent}'")


def parse_numbers(option: str, text: str | None) -> list[float] | None:
    """Parse numbers between commas, such as 0.49,0.48,0.45."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"cannot read {option} '{text}'; write numbers such as 0.49,0.48,0.45") from None


def root_words(root: Path | None) -> list[str]:
    """--root as it stands on a command line."""
    return [] if root is None else ["--root", str(root)]


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
