"""`holdfast analyze volume`: optimisers without gradients beside SGD, and the volumes of the two toys."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.analyze.plots.boundaries import boundaries_svg
from holdfast.analyze.volume.fitting import Bins, make_bins
from holdfast.analyze.volume.study import OPTIMISERS, Row, architecture_of, study, summary
from holdfast.analyze.volume.toys import slab_study, wedge_study
from holdfast.analyze.volume.volume_estimate import Volume
from holdfast.analyze.volume.wedge import wedge_task
from holdfast.cli.common import DataOption, RootOption, SeedOption, may_be_quiet, parse_option, table
from holdfast.data import load_data
from holdfast.errors import InputError, did_you_mean
from holdfast.utils.clock import now, until
from holdfast.utils.files import write_json
from holdfast.utils.show import Svg

console = Console()
FolderOption = Annotated[
    Path | None, typer.Option("--out", help="Folder for rows and pictures; the same command goes on with it.")
]


@may_be_quiet
def volume(
    data: DataOption = "mnist-mini",
    toy: Annotated[str | None, typer.Option(help="Study a toy in place of the data: wedge or slab.")] = None,
    architecture: Annotated[str, typer.Option(help="Architecture (`holdfast models`), or FILE.py:CLASS.")] = "lenet",
    arch_args: Annotated[list[str] | None, typer.Option(help="Argument of the architecture: hidden=[16].")] = None,
    width: Annotated[list[float] | None, typer.Option(help="Its option width; may be given several times.")] = None,
    samples: Annotated[list[int] | None, typer.Option(help="Training samples, of two classes; several times.")] = None,
    bins: Annotated[str, typer.Option(help="Bins of the normalised training loss: from:to:step.")] = "0.45:0.65:0.05",
    divisor: Annotated[float, typer.Option(help="Layers are scaled to this norm; 0 takes the raw loss.")] = 3.0,
    optimiser: Annotated[list[str] | None, typer.Option(help=f"{', '.join(OPTIMISERS)}; several times.")] = None,
    splits: Annotated[int, typer.Option(min=1, help="Random training sets.")] = 5,
    limit: Annotated[int, typer.Option(min=1, help="Guesses or steps allowed for each training set.")] = 100_000,
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which no new guesses are made.")] = None,
    out: FolderOption = None,
    seed: SeedOption = 0,
    root: RootOption = None,
) -> None:
    """Compare optimisers with and without gradients at equal training loss, or measure volumes on a toy.

    Guess and check finds a network with a probability that is proportional to its volume among the weights.
    """
    with until(float("inf") if time_limit is None else now() + time_limit):
        if toy is not None:
            _toy(toy, limit, seed, out)
            return
        dataset, edges = load_data(data, root=root), _bins(bins)
        widths: list[float | None] = list(width or ()) or [0.5 if architecture == "lenet" else None]
        make = architecture_of(architecture, dataset, dict(parse_option(text) for text in arch_args or []))
        rows = study(
            dataset,
            make,
            edges,
            widths=widths,
            samples=samples or (2, 4, 8),
            splits=splits,
            optimisers=optimiser or ("guess-and-check", "sgd", "linear"),
            divisor=divisor or None,
            limit=limit,
            seed=seed,
            out=out,
        )
    _show(rows, edges)


def _bins(text: str) -> Bins:
    try:
        low, high, step = map(float, text.split(":"))
    except ValueError:
        raise InputError(f"cannot read --bins '{text}'; write from:to:step, such as 0.45:0.65:0.05") from None
    return make_bins(low, high, step)


def _show(rows: list[Row], bins: Bins) -> None:
    """One line for each width, number of samples and optimiser; then what was not reached."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in summary(rows):
        key = ("" if row["width"] is None else f"{row['width']:g}", str(row["samples"]), row["optimiser"])
        error = "" if row["error"] is None else f" ± {100 * row['error']:.1f}"
        text = "none" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f}{error} ({row['splits']})"
        lines.setdefault(key, []).append(text)
    names = ["width", "samples", "optimiser", *(f"({low:g}, {high:g}]" for low, high in bins)]
    console.print(table(names, [[*key, *texts] for key, texts in lines.items()]))
    typer.echo("test accuracy in % by training loss, ± standard error, (training sets for which a network was found)")
    for row in rows:
        for sentence in row.get("missing", []):
            width = "" if row["width"] is None else f"width {row['width']:g}, "
            typer.echo(f"{width}{row['samples']} samples, training set {row['split']}: {sentence}")
    if not any(row["accuracy"] is not None for row in rows):
        raise InputError("no optimiser found a network in any bin; allow more guesses (--limit) or other --bins")


def _toy(name: str, limit: int, seed: int, out: Path | None) -> None:
    started = time.perf_counter()
    if name == "wedge":
        rows, picture = _wedge(limit, seed)
    elif name == "slab":
        rows, picture = _slab(limit, seed)
    else:
        raise InputError(f"unknown toy '{name}'. " + did_you_mean(name, ("wedge", "slab")))
    console.print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    typer.echo(f"{limit:,} guesses, 95 % intervals, {time.perf_counter() - started:.0f} s")
    if out is not None:
        picture.save(out / f"{name}.svg")
        write_json(out / f"{name}.json", rows)
        typer.echo(f"results: {out}")


def _wedge(limit: int, seed: int) -> tuple[list[Row], Svg]:
    found = wedge_study(guesses=limit, seed=seed)
    rows = [
        {
            "units": w.units,
            "volume of fits": str(w.volume),
            "accuracy": f"{100 * float(w.accuracy.mean()):.1f} %" if len(w.accuracy) else "none fit",
            "poisoned": f"{100 * float(w.poisoned_accuracy[0]):.0f} %" if len(w.poisoned) else "none fit",
        }
        for w in found
    ]
    groups = {f"guessed, {w.units} hidden units": (w.family, w.guessed) for w in found}
    groups |= {f"poisoned, {w.units} hidden units": (w.family, w.poisoned) for w in found}
    train, _ = wedge_task(seed=seed)
    return rows, boundaries_svg(groups, train.x, train.y, title="The wedge")


def _slab(limit: int, seed: int) -> tuple[list[Row], Svg]:
    found = slab_study(guesses=limit, seed=seed)
    shares: dict[str, Volume] = {"fits": found.fits, "linear": found.linear, "robust": found.robust}
    picked = {"linear": found.kinds.linear, "robust": found.kinds.robust}
    groups = {"fits": (found.family, found.weights)}
    groups |= {name: (found.family, found.weights[mask]) for name, mask in picked.items()}
    rows = [{"boundary": name, "volume": str(share)} for name, share in shares.items()]
    return rows, boundaries_svg(groups, found.points.x, found.points.y, title="The slabs")
