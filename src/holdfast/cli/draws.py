"""`holdfast analyze draws` and `holdfast analyze proxy`: random networks, and stand-ins for the gradient."""

from pathlib import Path
from typing import Annotated

import typer

import holdfast as hf
from holdfast.analyze.concentration import concentration, draw_gradients
from holdfast.analyze.draws import accuracy_by_draws, transfer_between_draws
from holdfast.analyze.plots.random_charts import density_svg, draws_svg, matrices_svg, proxy_svg
from holdfast.analyze.proxy_gradient import proxy_study
from holdfast.cli.common import (
    AS_IT_IS,
    DataOption,
    InputsOption,
    ModelArgument,
    Opening,
    RootOption,
    SeedOption,
    ThreatOption,
    check_table,
    open_both,
    opens_model,
)
from holdfast.cli.figures import ReportOption, show
from holdfast.data.draw import sample
from holdfast.errors import InputError
from holdfast.models import RandomNetwork
from holdfast.runs.certify_run import Row
from holdfast.utils.directions import cosines, unit
from holdfast.utils.files import write_text


@opens_model
def draws(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: ThreatOption = "linf:0.1",
    n: InputsOption = 50,
    gradients: Annotated[int, typer.Option(min=2, help="Draws whose gradients are compared.")] = 50,
    sources: Annotated[int, typer.Option(min=2, help="Draws whose examples are shown to each other.")] = 10,
    samples: Annotated[str, typer.Option(help="Draws for each gradient of the attacks.")] = "1,5,20",
    pictures: Annotated[Path | None, typer.Option(help="Folder for the pictures, as SVG files.")] = None,
    out: ReportOption = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Look at a random network through its draws: how much their gradients agree, and what attacks gain from more."""
    check_table(out)
    limit, numbers = hf.threat(threat), _numbers(samples)
    network, dataset = open_both(model, data, opening, root)
    if not isinstance(network, RandomNetwork):
        raise InputError("the model is no random network; its architecture is neither 'adv-bnn' nor 'rse'")
    taken = sample(dataset, n, seed=seed)
    found = concentration(network, taken.x, taken.y, draws=gradients, seed=seed)
    moved = transfer_between_draws(network, taken.x, taken.y, limit, draws=sources, seed=seed)
    curve = accuracy_by_draws(network, taken.x, taken.y, limit, samples=numbers, seed=seed)
    rows: list[Row] = [{"figure": "mean resultant length", "value": float(found.resultant.mean())}]
    rows.append({"figure": "kappa / dimension", "value": float(found.kappa.mean()) / taken.x[0].numel()})
    rows.append({"figure": "mean cosine of two draws", "value": float(found.r_mean.mean())})
    rows.append({"figure": "accuracy of a draw on another's examples", "value": moved.summary.mean})
    pairs = zip(curve.numbers, curve.accuracy, strict=True)
    rows += [{"figure": f"accuracy under eot-pgd, {k} draws", "value": left} for k, left in pairs]
    show(["figure", "value"], rows, out)
    typer.echo(f"at {limit}; inputs: {taken.drawn}; for the strongest attack: holdfast attack --method eot-grid")
    if pictures is not None:
        first = unit(draw_gradients(network, taken.x[:1], taken.y[:1], draws=gradients, seed=seed))[0]
        files = {
            "transfer.svg": matrices_svg({"accuracy": moved.matrix}, title="Examples of one draw shown to another"),
            "cosines.svg": matrices_svg({"first input": cosines(first)}, title="Cosines of gradients", low=-1.0),
            "accuracy.svg": draws_svg({"eot-pgd": curve}),
            "kappa.svg": density_svg({"kappa": found.kappa}, title="Concentration over the inputs", x_label="kappa"),
        }
        pictures.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_text(pictures / name, content)
        typer.echo(f"pictures: {pictures}")


def _numbers(texts: str) -> tuple[int, ...]:
    parts = texts.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise InputError(
            f"--samples must be numbers above zero with commas between them, such as 1,5,20, got '{texts}'"
        )
    return tuple(map(int, parts))


@opens_model
def proxy(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: ThreatOption = "l2:1",
    n: InputsOption = 50,
    steps: Annotated[int, typer.Option(min=1, help="Steps of PGD.")] = 20,
    picture: Annotated[Path | None, typer.Option(help="The curves: an .svg file.")] = None,
    out: ReportOption = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Run PGD along vectors at an angle to the gradient: how good must a stand-in for the gradient be?"""
    check_table(out)
    limit = hf.threat(threat)
    network, dataset = open_both(model, data, opening, root)
    taken = sample(dataset, n, seed=seed)
    found = proxy_study(network, taken.x, taken.y, limit, steps=steps, seed=seed)
    each = zip(found.degrees, found.relative, found.accuracy, strict=True)
    rows: list[Row] = [{"degrees": angle, "relative rise": rise, "accuracy": left} for angle, rise, left in each]
    show(["degrees", "relative rise", "accuracy"], rows, out)
    typer.echo(f"at {limit}; inputs: {taken.drawn}; to first order the rise follows the cosine of the angle")
    if picture is not None:
        write_text(picture, proxy_svg({str(limit): found}))
        typer.echo(f"picture: {picture}")
