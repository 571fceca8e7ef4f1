"""`holdfast analyze landscape`: the loss of a training run around the weights that it found."""

import csv
import io
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.analyze.connectivity import TS, barrier, connect, path_losses
from holdfast.analyze.landscape.attacked import Adversary
from holdfast.analyze.landscape.landscape_study import Extent, study
from holdfast.analyze.landscape.updates import write_updates
from holdfast.analyze.plots.charts import path_svg
from holdfast.cli.common import SeedOption
from holdfast.data.draw import sample
from holdfast.models import load_model
from holdfast.training import folder as files
from holdfast.training.recipe.reading import load_recipe
from holdfast.training.setup import prepare
from holdfast.utils.files import write_csv, write_json, write_text
from holdfast.utils.hashes import hash_model
from holdfast.utils.limits import parse_json, read_text
from holdfast.utils.progress import progress_bars
from holdfast.utils.resume import as_stored


def landscape(
    run: Annotated[Path, typer.Argument(help="Folder of a finished training.")],
    against: Annotated[
        Path | None, typer.Option(help="Folder of another training of the same network: is there a path of low loss?")
    ] = None,
    threat: Annotated[str | None, typer.Option(help="The adversary; by default the threat of the recipe.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Training inputs, drawn with the classes balanced.")] = 500,
    top: Annotated[int, typer.Option(min=1, help="Eigenvalues of the Hessian.")] = 5,
    span: Annotated[float, typer.Option(help="Largest step along an eigenvector.")] = 1.0,
    cells: Annotated[int, typer.Option(min=3, help="Points on each axis of a picture.")] = 11,
    steps: Annotated[int, typer.Option(min=1, help="Steps of PGD.")] = 10,
    curve_steps: Annotated[int, typer.Option(min=1, help="Steps of Adam for the path to the other training.")] = 300,
    updates: Annotated[
        bool | None,
        typer.Option(help="Draw the log of the updates, and insist on it; by default it is drawn where there is one."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; by default 'landscape' inside the run.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Measure the sharpness of the minimum under attack and draw the loss around it; figures as CSV, pictures as SVG.

    The Hessian keeps the perturbed inputs as they are; the pictures attack anew at every point. A study that was
    stopped goes on where it was.
    """
    recipe = load_recipe(run)
    folder = out or run / "landscape"
    if updates or (updates is None and recipe.log.updates):
        _updates(run, against, folder)
    task = prepare(recipe, None, None, None)
    limit = hf.threat(threat) if threat is not None else task.threat or hf.Linf(0.0)
    adversary = Adversary(limit, steps=steps, seed=seed)
    taken = sample((task.train.x, task.train.y), n, seed=seed)
    x, y = taken.x, taken.y
    model = load_model(run / files.MODEL)
    with progress_bars() as bars:
        bar = bars.add_task("landscape", total=None)
        found = study(
            model,
            x,
            y,
            adversary,
            folder,
            extent=Extent(k=top, span=span, cells=cells),
            watch=lambda text: bars.update(bar, description=text),
        )
    values = ", ".join(f"{value:.4g}" for value in found.values.tolist())
    typer.echo(f"loss {found.loss:.4g} under {limit}; top eigenvalues (perturbations frozen): {values}")
    if against is not None:
        other = load_model(against / files.MODEL)
        height = _path(model, other, x, y, adversary, folder, curve_steps)
        typer.echo(f"barrier on the path to '{against}': {height:.4g} (0: the path never exceeds its ends)")
    typer.echo(f"training inputs: {taken.drawn}; figures and pictures: {folder}")


def _updates(run: Path, against: Path | None, folder: Path) -> None:
    """Draw the logs of one or two runs and say what they show; the other run may have none."""
    runs = {"run": run}
    if against is not None and load_recipe(against).log.updates:
        runs["against"] = against
    for name, found in write_updates(runs, folder).items():
        dead = "" if found.dead is None else f"; dead from update {found.dead} on: {', '.join(found.layers)}"
        typer.echo(
            f"{name}: {found.updates} updates, mean gradient {found.first:.4g} at the start and {found.last:.4g} at "
            f"the end, {found.distance:.4g} from the start{dead}"
        )


def _path(
    model: nn.Module, other: nn.Module, x: Tensor, y: Tensor, adversary: Adversary, folder: Path, steps: int
) -> float:
    """Bend a curve between two models under attack, write the loss along it, and return its barrier.

    The path to the same model is not looked for again.
    """

    def attacked(net: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        return cross_entropy(net(adversary.perturb(net, a, b)), b)

    settings = {"from": hash_model(model), "to": hash_model(other), "threat": str(adversary.threat), "steps": steps}
    path, about = folder / "path.csv", folder / "path.json"
    if path.exists() and about.exists() and parse_json(read_text(about)) == as_stored(settings):
        rows = list(csv.DictReader(io.StringIO(read_text(path))))
        return barrier([float(row["under attack"]) for row in rows])
    curve = connect(model, other, attacked, x, y, steps=steps, lr=1e-3, seed=adversary.seed)
    losses = path_losses(curve, {"under attack": attacked, "clean": _clean}, x, y, x_train=x)
    lines = {name: values.tolist() for name, values in losses.items()}
    path.unlink(missing_ok=True)  # never beside the settings of another path
    write_json(about, as_stored(settings))
    write_csv(path, [("t", *lines), *zip(TS, *lines.values(), strict=True)])
    write_text(folder / "path.svg", path_svg(lines, list(TS), title="Loss along the path between two trainings"))
    return barrier(losses["under attack"])


def _clean(net: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    return cross_entropy(net(a), b)
