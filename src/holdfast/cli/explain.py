"""`holdfast explain`: pictures of explanations, and how well they overlap the object."""

import copy
import csv
import io
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import holdfast as hf
from holdfast.cli.common import (
    AS_IT_IS,
    DataOption,
    InputsOption,
    ModelArgument,
    Opening,
    RootOption,
    open_both,
    opens_model,
)
from holdfast.cli.trust import trust
from holdfast.data import Split
from holdfast.data.draw import draw as drawn
from holdfast.data.draw import part_of, sample
from holdfast.errors import InputError, StorageError
from holdfast.explanations.core.counterfactuals import counterfactuals
from holdfast.explanations.core.pictures import Panel, draw, grey, models_figure, save_figure
from holdfast.explanations.evaluate.annotations import read_boxes
from holdfast.explanations.evaluate.locality import METHODS, SCORES, Locality, locality, promises
from holdfast.explanations.evaluate.randomise import randomise_all

PICTURES = "pictures"


class DefaultGroup(typer.core.TyperGroup):
    """`holdfast explain MODEL` is `holdfast explain pictures MODEL`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Insert the default command if the first word is not a command."""
        if args and args[0] not in self.commands:
            args = [PICTURES, *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(add_completion=False, cls=DefaultGroup, help="Which features decide an answer.", no_args_is_help=True)

MethodOption = Annotated[
    list[str] | None,
    typer.Option("--method", help="`holdfast methods explain`; may be given several times."),
]


def parse_inputs(text: str, count: int) -> list[int]:
    """Parse positions such as 0,3,7 or 0-4, all below `count`."""
    try:
        spans = [part.split("-") for part in text.split(",")]
        chosen = [i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)]
    except ValueError:
        raise InputError(f"cannot read the inputs '{text}'; write positions such as 0,3,7 or 0-4") from None
    if not chosen or min(chosen) < 0 or max(chosen) >= count:
        raise InputError(f"--inputs {text}: expected positions from 0 to {count - 1}")
    return chosen


@app.command(PICTURES)
@opens_model
def pictures(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    method: MethodOption = None,
    inputs: Annotated[str, typer.Option(help="Positions in the test split: 0,3,7 or 0-4.")] = "0-3",
    n: Annotated[
        int | None, typer.Option("--n", "-n", min=1, help="In place of --inputs: so many, with the classes balanced.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("runs/explain"),
    style: Annotated[str, typer.Option(help="overlay, signed or heat.")] = "overlay",
    against: Annotated[list[Path] | None, typer.Option(help="Other models to compare with the first.")] = None,
    quantity: Annotated[str, typer.Option(help="logit, probability or margin.")] = "logit",
    seed: Annotated[int, typer.Option(help="Fixes every random choice.")] = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Draw explanations of chosen test inputs: one picture each, and all methods (and models) side by side."""
    network, dataset = open_both(model, data, opening, root)
    part = part_of(dataset)
    chosen = parse_inputs(inputs, len(part)) if n is None else drawn(part.y, n, seed).tolist()
    x, y = part.x[chosen], part.y[chosen]
    names = [f"input {i}: {dataset.classes[label]}" for i, label in zip(chosen, y.tolist(), strict=True)]
    how: dict[str, Any] = {"quantity": quantity, "seed": seed, "index": torch.tensor(chosen)}
    rows: list[list[Panel]] = [[Panel(name, grey(image))] for name, image in zip(names, x, strict=True)]
    notes = []
    for chosen_method in method or list(METHODS):
        result = hf.explain(network, x, y, chosen_method, **how)
        near = counterfactuals(network, x, result, dataset.classes)
        for k, i in enumerate(chosen):
            panel = Panel(chosen_method, draw(x[k], result.attribution[k], style))  # type: ignore[arg-type]
            save_figure([[panel]], out / f"{i:06d}-{chosen_method}.png")
            rows[k].append(panel)
            image = None if near is None else near[k].image
            if near is not None and image is not None:
                other = Panel(near[k].title, grey(image))
                save_figure([[other]], out / f"{i:06d}-{chosen_method}-counterfactual.png")
                rows[k].append(other)
            notes.append(
                {
                    "input": i,
                    "method": chosen_method,
                    "ok": bool(result.ok[k]),
                    "completeness_error": float(result.error[k]),
                    "distance": None if near is None else near[k].distance,
                    "rival": None if near is None else near[k].rival,
                    "gradients": int(result.gradients[k]),
                    "by": result.by[k],
                }
            )
    save_figure(rows, out / "methods.svg", title=f"Explanations of {model.stem}")
    if against:
        models = {model.stem: network, **{p.stem: open_both(p, data, opening, root)[0] for p in against}}
        for chosen_method in method or list(METHODS):
            figure = models_figure(models, x, y, chosen_method, style=style, names=names, **how)  # type: ignore[arg-type]
            save_figure(figure, out / f"models-{chosen_method}.svg", title=f"{chosen_method} of several models")
    write_csv(out / "explanations.csv", notes)
    failed = sum(not note["ok"] for note in notes)
    typer.echo(f"{len(notes)} explanations, {failed} with a fallback or incomplete: {out / 'explanations.csv'}")
    typer.echo(f"side by side: {out / 'methods.svg'}")


@app.command("locality")
@opens_model
def locality_command(
    model: ModelArgument,
    data: DataOption = "digit-scenes",
    boxes: Annotated[Path | None, typer.Option(help="CSV or COCO file; the boxes of the data if not given.")] = None,
    resize: Annotated[
        int | None, typer.Option(min=1, help="The images were resized to this shorter side after the boxes were drawn.")
    ] = None,
    crop: Annotated[
        int | None, typer.Option(min=1, help="And this square was cropped from their middle; both need --boxes.")
    ] = None,
    floor: Annotated[
        bool, typer.Option("--floor/--no-floor", help="Also score the model with random weights: what chance gives.")
    ] = True,
    method: MethodOption = None,
    n: InputsOption = 200,
    out: Annotated[Path | None, typer.Option(help="Scores of each input, a .csv file.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes every random choice.")] = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Score how well explanations overlap the boxes around the objects: precision, recall, F1, pointing game."""
    if out is not None and out.suffix != ".csv":
        raise InputError(f"--out must end in .csv, got '{out}'")
    network, dataset = open_both(model, data, opening, root)
    taken = sample(dataset, n, seed=seed)
    part, positions = part_of(dataset)[taken.index], taken.index.tolist()
    where = _boxes(part, boxes, taken.index, resize, crop)
    chance = randomise_all(copy.deepcopy(network), seed) if floor else None
    columns = ("method", "score", "mean", "95 %", *(("random weights",) if floor else ()), "inputs")
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    rows, kept = list[dict[str, Any]](), list[str]()
    for name in method or list(METHODS):
        how: dict[str, Any] = {"seed": seed, **METHODS.get(name, {})}
        found = locality(network, part.x, part.y, where, name, **how)
        without = None if chance is None else locality(chance, part.x, part.y, where, name, **how).means
        for score, mean in found.means.items():
            low, high = mean.interval
            least = () if without is None else (f"{without[score].mean:.3f}",)
            table.add_row(name, score, f"{mean.mean:.3f}", f"{low:.3f} to {high:.3f}", *least, str(mean.count))
        kept.append(f"{name}: {promises(found.explanation)}")
        rows += _scores(found, positions, name)
    Console().print(table)
    typer.echo("\n".join(kept))
    aside = {positions[i]: reason for i, reason in enumerate(found.problem) if reason}
    typer.echo(f"inputs of '{dataset.name}': {taken.drawn}; {len(aside)} set aside")
    typer.echo("95 % intervals of the mean: Clopper-Pearson for pointing, 1.96 standard errors for the others")
    for i, reason in list(aside.items())[:5]:
        typer.echo(f"set aside: input {i}, {reason}")
    if out is not None:
        write_csv(out, rows)
        typer.echo(f"results: {out}")


app.command("trust")(trust)


def _scores(found: Locality, positions: list[int], method: str) -> list[dict[str, Any]]:
    """A row for each input: its scores, and how far its explanation can be trusted."""
    rows = []
    for i, reason in enumerate(found.problem):
        scores = {score: float(getattr(found.scores, score)[i]) for score in SCORES}
        about = {"ok": bool(found.explanation.ok[i]), "completeness_error": float(found.explanation.error[i])}
        rows.append({"input": positions[i], "method": method, **scores, **about, "set_aside": reason})
    return rows


def _boxes(part: Split, path: Path | None, index: Tensor, resize: int | None, crop: int | None) -> Any:
    """Load boxes of the inputs at these positions from the user's file, or take the boxes of the data."""
    if path is not None:
        table = read_boxes(path).select(index)
        return table if resize is None and crop is None else table.cropped(resize, crop)
    if resize is not None or crop is not None:
        raise InputError("--resize and --crop move the boxes of a file; give one with --boxes")
    if part.boxes is None:
        raise InputError("the data have no boxes; give --boxes FILE.csv, or use --data digit-scenes")
    boxes: Tensor = part.boxes
    return boxes


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as CSV, and create the folder if it is missing."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(buffer.getvalue(), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write '{path}': {error.strerror}") from error
