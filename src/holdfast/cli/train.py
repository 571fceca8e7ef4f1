"""`holdfast train`: a recipe, run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import holdfast as hf
from holdfast.cli.common import table
from holdfast.training import list_recipes, parse_override

app = typer.Typer(add_completion=False)
console = Console()


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="Name of a recipe, or a TOML file.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override: key=value, e.g. epochs=3.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/RECIPE if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing run.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show the recipes that come with Holdfast.")] = False,
) -> None:
    """Train a model with a recipe."""
    if listing or recipe is None:
        rows = [[r.name, r.summary, r.threat or "none", r.needs] for r in list_recipes()]
        console.print(table(["name", "what it is", "threat", "what it needs"], rows))
        return
    is_run = Path(recipe).is_dir()
    folder = out or (Path(recipe) if is_run and resume else Path("runs") / Path(recipe).stem)
    overrides = dict(parse_override(text) for text in settings or [])
    result = hf.train(recipe, out=folder, resume=resume, force=force, **overrides)
    shown = {key: value for key, value in result.history[-1].items() if isinstance(value, int | float)}
    typer.echo("  ".join(f"{key}={value:.4g}" for key, value in shown.items()))
    typer.echo(f"model: {folder / 'model.safetensors'}")
