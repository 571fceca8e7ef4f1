"""`holdfast attack`: adversarial examples, kept as they are found."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

import holdfast as hf
from holdfast.cli.common import (
    AS_IT_IS,
    THREATS,
    DataOption,
    InputsOption,
    ModelArgument,
    OldInputsOption,
    Opening,
    RootOption,
    SeedOption,
    may_be_quiet,
    open_both,
    opens_model,
    parse_option,
    run_folder,
)
from holdfast.data import Dataset
from holdfast.errors import InputError, Interrupted
from holdfast.runs.attack_run import attack_run
from holdfast.runs.attack_summary import summary_table
from holdfast.threats import Threat

app = typer.Typer(add_completion=False)
console = Console()


@app.command()
@may_be_quiet
@opens_model
def attack(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: Annotated[str | None, typer.Option(help=f"{THREATS} linf:0.1 if not given.", show_default=False)] = None,
    minimum: Annotated[bool, typer.Option("--minimum", help="Find the nearest example; takes no --threat.")] = False,
    norm: Annotated[str | None, typer.Option(help="With --minimum: linf, l2 (default) or l1.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Attack (`holdfast methods attack`): cascade if not given; with --minimum: auto."),
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="Option of the attack: name=value, e.g. steps=20.")] = None,
    n: InputsOption = 500,
    inputs: OldInputsOption = None,
    seed: SeedOption = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/attack-MODEL-THREAT-METHOD if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    png: Annotated[
        bool, typer.Option("--png", help="Also write PNG files of the examples that survive rounding to 8 bits.")
    ] = False,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Find an adversarial example of each input, within a threat or as near as possible, and save it.

    After a kill, run the same command with --resume: it continues where it stopped.
    """
    if minimum and threat is not None:
        raise InputError("--minimum looks for the nearest example and has no --threat; give --norm linf, l2 or l1")
    if norm is not None and not minimum:
        raise InputError("--norm goes with --minimum; a --threat such as l2:0.5 names its norm itself")
    goal = (norm or "l2") if minimum else hf.threat(threat or "linf:0.1")
    method = method or ("auto" if minimum else "cascade")
    options = dict(parse_option(text) for text in option or [])
    network, dataset = open_both(model, data, opening, root)
    folder = out or run_folder("attack", model.stem, *(("minimum",) if minimum else ()), str(goal), method)
    how: dict[str, Any] = {"options": options, "n": inputs or n, "seed": seed, "resume": resume, "png": png}
    keep_examples(network, dataset, goal, method, folder, model.stem, **how)


def keep_examples(
    network: nn.Module, dataset: Dataset, goal: Threat | str, method: str, folder: Path, name: str, **how: Any
) -> None:
    """Run the attack, for a threat or for the nearest example in a norm, and say what it found."""
    try:
        run = attack_run(network, dataset, goal, method, out=folder, name=name, **how)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; finished batches are in {folder}. Go on: same command with --resume") from None
    console.print(summary_table(run.summary))
    if how["png"]:
        pictures = run.summary["png"]
        outside = "" if isinstance(goal, str) else f", {pictures['outside']} outside the threat"
        typer.echo(
            f"pictures: {pictures['written']} in {folder / 'png'}; "
            f"lost to 8 bits: {pictures['right_again']} classified right again{outside}"
        )
    typer.echo(f"results: {folder / 'results.csv'}")
