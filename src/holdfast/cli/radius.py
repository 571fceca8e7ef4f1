"""`holdfast radius`: how far each input is proved."""

from typing import Annotated, Any, cast

import typer
from rich.console import Console

from holdfast.certificates.core.radius import radius_method
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
    TableOption,
    check_table,
    may_be_quiet,
    open_both,
    opens_model,
    parse_option,
    table,
)
from holdfast.data.draw import sample
from holdfast.runs.certify_run import write_rows
from holdfast.runs.radius_run import radius_run, radius_summary

app = typer.Typer(add_completion=False)


@app.command()
@may_be_quiet
@opens_model
def radius(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    norm: NormOption = "linf",
    method: Annotated[
        str,
        typer.Option(
            help="pec, kw, fastlin, crown, crown-ibp, ibp; beta-crown: exact, given time; at l2 also gloro, lipschitz, "
            "smoothing."
        ),
    ] = "pec",
    option: MethodOptions = None,
    n: InputsOption = 100,
    sigma: Annotated[float | None, typer.Option(help="Noise of smoothing; use the noise of training.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Largest number of samples per input, for smoothing.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Probability of a wrong radius, for smoothing.")] = None,
    out: TableOption = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Find the largest radius around each input in which its class is proved not to change.

    The radius is a lower bound of the robust radius; `holdfast nearest` finds an upper one.
    """
    check_table(out)
    given = {"sigma": sigma, "n": samples, "alpha": alpha}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options |= dict(parse_option(text) for text in option or [])
    if "seed" in radius_method(method).options:
        options.setdefault("seed", seed)
    network, dataset = open_both(model, data, opening, root)
    taken = sample(dataset, n, seed=seed)
    rows = radius_run(network, taken.x, taken.y, cast(Any, norm), method, index=taken.index, options=options)
    radii = [float(str(row["radius"])) for row in rows]
    Console().print(
        table([f"{norm} radius", ""], [[name, f"{value:.4g}"] for name, value in radius_summary(radii).items()])
    )
    proved = sum(value > 0 for value in radii)
    typer.echo(f"a radius above 0 is proved for {proved} of {len(rows)} inputs by '{method}'; inputs: {taken.drawn}")
    if "exact" in rows[0]:
        exact, broken = (sum(bool(row[name]) for row in rows) for name in ("exact", "broken"))
        typer.echo(
            f"{exact} of {len(rows)} radii are exact: a counter-example lies within the tolerance above them. "
            f"Counter-examples were found for {broken}."
        )
    if out is not None:
        write_rows(out, rows)
        typer.echo(f"results: {out}")
