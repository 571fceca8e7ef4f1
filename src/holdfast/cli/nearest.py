"""`holdfast nearest`: how near the nearest adversarial example is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.attack import keep_examples
from holdfast.cli.common import (
    AS_IT_IS,
    DataOption,
    InputsOption,
    MethodOptions,
    ModelArgument,
    NormOption,
    Opening,
    RootOption,
    SeedOption,
    may_be_quiet,
    open_both,
    opens_model,
    parse_option,
    run_folder,
)

app = typer.Typer(add_completion=False)


@app.command()
@may_be_quiet
@opens_model
def nearest(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    norm: NormOption = "l2",
    method: Annotated[str, typer.Option(help="Attack with a nearest form, such as fmn, ddn, fab; or all of them.")] = (
        "auto"
    ),
    option: MethodOptions = None,
    n: InputsOption = 500,
    seed: SeedOption = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/nearest-MODEL-NORM-METHOD if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    png: Annotated[
        bool, typer.Option("--png", help="Also write PNG files of the examples that survive rounding to 8 bits.")
    ] = False,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Find the adversarial example that is nearest to each input, and save it with its distance.

    The distance is an upper bound of the robust radius; `holdfast radius` proves a lower one. After a kill, run the
    same command with --resume.
    """
    options = dict(parse_option(text) for text in option or [])
    network, dataset = open_both(model, data, opening, root)
    folder = out or run_folder("nearest", model.stem, norm, method)
    how: dict[str, Any] = {"options": options, "n": n, "seed": seed, "resume": resume, "png": png}
    keep_examples(network, dataset, norm, method, folder, model.stem, **how)
