"""`holdfast analyze difficulty` and `holdfast analyze subsets`: which training inputs are hard, and what they do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

import holdfast as hf
from holdfast.analyze.difficulty import d_distance, difficulty, group_means, group_statistics
from holdfast.analyze.difficulty_page import difficulty_page
from holdfast.analyze.plots.group_charts import SHOWN, groups_svg
from holdfast.analyze.subsets import subset_run
from holdfast.cli.common import SeedOption, TableOption, check_table
from holdfast.cli.figures import ReportOption, keep, show
from holdfast.errors import InputError
from holdfast.models import load_model
from holdfast.runs.certify_run import Row
from holdfast.training import folder as files
from holdfast.training.logs import read_examples
from holdfast.training.recipe.reading import load_recipe
from holdfast.training.setup import prepare
from holdfast.training.subset import mean_losses
from holdfast.utils.files import write_csv, write_text


def difficulty_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished training.")],
    against: Annotated[
        Path | None, typer.Option(help="Folder of another training on the same data: how much do the two disagree?")
    ] = None,
    skip: Annotated[
        int, typer.Option(min=0, help="Epochs to leave out at the start; needs a run with log.losses.")
    ] = 0,
    zero_one: Annotated[
        bool, typer.Option("--zero-one", help="Rank by 0-1 errors in place of losses; needs a run with log.losses.")
    ] = False,
    groups: Annotated[int, typer.Option(min=1, help="Groups of equal difficulty to show.")] = 10,
    images: Annotated[int, typer.Option(min=1, help="Hardest and easiest inputs on the page, of each.")] = 40,
    steps: Annotated[int, typer.Option(min=1, help="Steps of PGD.")] = 10,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the page and the plot; by default 'difficulty' inside the run.")
    ] = None,
    out: TableOption = None,
    seed: SeedOption = 0,
) -> None:
    """Rank the training inputs of a run by their loss over all epochs, and show how each group is fitted now.

    0 is the hardest input, 1 the easiest. A page shows the hardest and the easiest ones; with log.losses = true in
    the recipe of the run, a plot shows how the groups were fitted through the epochs.
    """
    check_table(out)
    losses = mean_losses(run, skip=skip, zero_one=zero_one)
    ranks = difficulty(losses)
    other = None if against is None else difficulty(mean_losses(against, skip=skip, zero_one=zero_one))
    recipe, place = load_recipe(run), folder or run / "difficulty"
    task = prepare(recipe, None, None, None)
    x, y = task.train.x, task.train.y
    if len(x) != len(ranks):
        raise InputError(f"the run in '{run}' has losses of {len(ranks)} inputs, but its data now have {len(x)}")
    limit = task.threat or hf.Linf(0.0)
    network = load_model(run / files.MODEL)
    found = group_statistics(network, x, y, ranks, limit, count=groups, steps=steps, seed=seed)
    columns = (found.size.tolist(), found.loss.tolist(), found.feature_norm.tolist())
    shown: list[Row] = [
        {"difficulty": f"{i / groups:.2g} to {(i + 1) / groups:.2g}", "inputs": size, "loss": loss, "features": norm}
        for i, (size, loss, norm) in enumerate(zip(*columns, strict=True))
    ]
    show(list(shown[0]), shown, None)
    typer.echo(f"loss and norm of the features under PGD at {limit}; hardest: {ranks.argsort()[:10].tolist()}")
    if other is not None:
        typer.echo(f"distance to '{against}': {d_distance(ranks, other):.3f} (0 is the same ranking, 1/3 is chance)")
    chart = _monitor(run, ranks, groups, place) if recipe.log.losses else None
    if chart is None:
        typer.echo("groups through the epochs: no log; write one with --set log.losses=true when training")
    title = f"Hard and easy training inputs of {run.name}"
    page = difficulty_page(x, y, ranks, task.classes, title=title, count=images, charts=[chart] if chart else [])
    write_text(place / "difficulty.html", page)
    typer.echo(f"hardest and easiest inputs: {place / 'difficulty.html'}")
    each = zip(y.tolist(), losses.tolist(), ranks.tolist(), strict=True)
    keep([{"input": i, "label": k, "loss": g, "difficulty": d} for i, (k, g, d) in enumerate(each)], out)


def _monitor(run: Path, ranks: Tensor, count: int, folder: Path) -> str:
    """Write how each group was fitted through the epochs, as groups.csv and groups.svg; returns the picture."""
    means = {"loss under attack": group_means(read_examples(run), ranks, count=count)}
    try:
        means["norm of the features"] = group_means(read_examples(run, "norm"), ranks, count=count)
    except InputError:  # the model does not end in a linear layer
        typer.echo("norms of the features: none, as the model does not end in a linear layer")
    header = ("epoch", *(f"{name}, group {i}" for name in means for i in range(count)))
    rows = zip(*(column for value in means.values() for column in value.T.tolist()), strict=True)
    write_csv(folder / "groups.csv", [header, *((epoch, *row) for epoch, row in enumerate(rows, 1))])
    shown = sorted({round(i * (count - 1) / (len(SHOWN) - 1)) for i in range(len(SHOWN))})
    picture = groups_svg(means, shown=shown, errors=_errors(run))
    write_text(folder / "groups.svg", picture)
    return picture


def _errors(run: Path) -> Mapping[str, list[float]]:
    rows = files.read_history(run)
    robust = [1 - float(row["validation_robust"]) for row in rows if row.get("validation_robust")]
    return {"validation error under attack": robust} if len(robust) == len(rows) and rows else {}


def subsets_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of trainings on different parts of the data.")],
    out: ReportOption = None,
) -> None:
    """Compare trainings on easy, random and hard parts of the data: overfitting, and a bound of the steepness."""
    check_table(out)
    rows: list[Row] = []
    for run in runs:
        found = subset_run(run)
        rows.append({"run": run.name, **vars(found), "overfitted": found.overfitted})
    show(list(rows[0]), rows, out)
    typer.echo("fitted: last epoch, training inputs; best, last: under attack, validation; lipschitz: proved, l2")
