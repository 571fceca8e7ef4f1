"""`holdfast compare`: finished trainings side by side."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.common import THREATS, InputsOption, OldInputsOption, may_be_quiet
from holdfast.errors import Interrupted
from holdfast.runs.compare import compare as compare_runs
from holdfast.runs.compare import default_folder

app = typer.Typer(add_completion=False)
console = Console()


@app.command()
@may_be_quiet
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished trainings.")],
    n: InputsOption = 500,
    inputs: OldInputsOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; runs/compare-HASH if not given.")] = None,
    data: Annotated[str | None, typer.Option(help="Data to evaluate on; the data of the recipes if not given.")] = None,
    threat: Annotated[str | None, typer.Option(help=f"{THREATS} The threat of the recipes if not given.")] = None,
    attack: Annotated[
        str, typer.Option(help="Attack to run besides PGD: autoattack, cascade (quicker) or none.")
    ] = "autoattack",
    pair: Annotated[
        bool, typer.Option("--pair", help="Also APGD-CE and APGD-DLR alone, which some works call AutoAttack.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace another comparison in the folder.")] = False,
) -> None:
    """Compare finished trainings: clean and robust accuracy, time, memory, overfitting.

    After a kill, or with more runs and the same --out, run it again: it does only what is missing.
    """
    folder = out or default_folder(runs)
    try:
        result = compare_runs(
            runs, data=data, threat=threat, attack=attack, pair=pair, inputs=inputs or n, out=folder, force=force
        )
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; finished batches are in {folder}. Go on: same command") from None
    console.print(result.table())
    typer.echo(f"table: {folder / 'compare.md'}")
    typer.echo(f"plot: {folder / 'compare.svg'}")
