"""`holdfast train`: a recipe, run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import holdfast as hf
from holdfast.cli.common import AS_IT_IS, Opening, RootOption, may_be_quiet, open_both, opens_model, table
from holdfast.errors import InputError
from holdfast.training import list_recipes, load_recipe, parse_override
from holdfast.training.patch_plan import plan_patch_training

app = typer.Typer(add_completion=False)
console = Console()


@app.command()
@may_be_quiet
@opens_model
def train(
    recipe: Annotated[str | None, typer.Argument(help="Name of a recipe, or a TOML file.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override: key=value, e.g. epochs=3.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Go on from the model in this file; .pt with --architecture.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Name of a data set or a path; the data of the recipe if not given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/RECIPE if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing run.")] = False,
    within: Annotated[
        float | None,
        typer.Option(help="Against patches: choose the places to train on so that the run ends within SECONDS."),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show the recipes that come with Holdfast.")] = False,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Train a model with a recipe."""
    if listing or recipe is None:
        rows = [[r.name, r.summary, r.threat or "none", r.needs] for r in list_recipes()]
        console.print(table(["name", "what it is", "threat", "what it needs"], rows))
        return
    if model is None and opening != AS_IT_IS:
        raise InputError("--architecture and its options say how to read the file of --model; give that as well")
    if within is not None and resume:
        raise InputError("--within chooses the places of a new run; leave it out with --resume")
    is_run = Path(recipe).is_dir()
    folder = out or (Path(recipe) if is_run and resume else Path("runs") / Path(recipe).stem)
    overrides = dict(parse_override(text) for text in settings or [])
    network = None
    if model is not None:
        known = data or load_recipe(recipe, overrides).data
        if known is None:
            raise InputError(f"the recipe '{recipe}' names no data; give --data")
        network, _ = open_both(model, known, opening, root)
    if within is not None:
        plan = plan_patch_training(recipe, within, network, data, **overrides)
        typer.echo(f"places: {plan.strategy}, about {plan.seconds:.0f} s; " + _all_costs(plan.predicted))
        overrides["objective"] = plan.objective
    result = hf.train(recipe, network, data, out=folder, resume=resume, force=force, **overrides)
    shown = {key: value for key, value in result.history[-1].items() if isinstance(value, int | float)}
    typer.echo("  ".join(f"{key}={value:.4g}" for key, value in shown.items()))
    typer.echo(f"model: {folder / 'model.safetensors'}")


def _all_costs(predicted: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.0f}" for name, seconds in predicted.items())
