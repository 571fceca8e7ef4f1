"""`holdfast explain trust`: whether explanations keep what they promise."""

from typing import Annotated, Any

import typer
from rich.console import Console

from holdfast.cli.common import (
    AS_IT_IS,
    DataOption,
    InputsOption,
    ModelArgument,
    Opening,
    RootOption,
    SeedOption,
    TableOption,
    check_table,
    may_be_quiet,
    open_both,
    opens_model,
    table,
)
from holdfast.data.draw import sample
from holdfast.explanations.evaluate.locality import METHODS, mean_of
from holdfast.explanations.evaluate.trust import TRUST, trust_scores
from holdfast.runs.certify_run import Row, write_rows
from holdfast.utils.progress import progress_bars

BETTER = {name: "high" if name == "insertion" else "low" for name in TRUST}


@may_be_quiet
@opens_model
def trust(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    method: Annotated[
        list[str] | None, typer.Option("--method", help="`holdfast methods explain`; may be given several times.")
    ] = None,
    n: InputsOption = 50,
    samples: Annotated[int, typer.Option(min=1, help="Draws for infidelity and sensitivity.")] = 10,
    sigma: Annotated[float, typer.Option(help="Noise of infidelity.")] = 0.1,
    radius: Annotated[float, typer.Option(help="Largest change of a pixel for sensitivity.")] = 0.02,
    out: TableOption = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Measure whether explanations can be trusted: completeness, infidelity, sensitivity, deletion, insertion."""
    check_table(out)
    network, dataset = open_both(model, data, opening, root)
    taken = sample(dataset, n, seed=seed)
    how: dict[str, Any] = {"samples": samples, "sigma": sigma, "radius": radius, "seed": seed, "index": taken.index}
    names, shown, rows = method or list(METHODS), [], list[Row]()
    with progress_bars() as bars:
        bar = bars.add_task("explain trust", total=len(names))
        for name in names:
            found = trust_scores(network, taken.x, taken.y, name, **how, **METHODS.get(name, {}))
            for score, values in found.items():
                mean = mean_of(values)
                low, high = mean.interval
                numbers = [f"{mean.mean:.4g}", f"{low:.4g} to {high:.4g}"] if mean.count else ["-", "-"]
                shown.append([name, score, BETTER[score], *numbers, str(mean.count)])
            columns = zip(*(values.tolist() for values in found.values()), strict=True)
            for i, scores in zip(taken.index.tolist(), columns, strict=True):
                rows.append({"input": i, "method": name, **dict(zip(found, scores, strict=True))})
            bars.advance(bar)
    Console().print(table(["method", "score", "good", "mean", "95 %", "inputs"], shown))
    typer.echo(f"inputs of '{dataset.name}': {taken.drawn}; - where a method has no baseline or no slope")
    if out is not None:
        write_rows(out, rows)
        typer.echo(f"results: {out}")
