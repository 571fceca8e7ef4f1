"""`holdfast certify`: proofs, input by input."""

from pathlib import Path
from typing import Annotated, Any

import typer

import holdfast as hf
from holdfast.bounding.core.region import BALLS
from holdfast.cli.common import (
    AS_IT_IS,
    DataOption,
    ModelArgument,
    OldInputsOption,
    Opening,
    RootOption,
    ThreatOption,
    check_table,
    may_be_quiet,
    open_both,
    opens_model,
    parse_option,
)
from holdfast.data.draw import sample
from holdfast.errors import Interrupted
from holdfast.registry import get
from holdfast.runs.certify_run import began_with_the_first, certify_run, one_shot, write_rows

app = typer.Typer(add_completion=False)
SHOWN = 5
"""Inputs without a proof whose worst place is printed; the file has all of them."""


@app.command()
@may_be_quiet
@opens_model
def certify(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: ThreatOption = "linf:0.1",
    method: Annotated[str, typer.Option(help="Certificate (`holdfast methods certify`).")] = "auto",
    n: Annotated[
        int | None,
        typer.Option(
            "--n", "-n", min=1, help="Number of test inputs, drawn with the classes balanced; 500 if not given."
        ),
    ] = None,
    inputs: OldInputsOption = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Largest number of samples per input, for methods that sample.")
    ] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise of smoothing; use the noise of training.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Probability of a wrong proof, for methods that sample.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Option of the method: name=value, e.g. seed=1.")] = None,
    out: Annotated[Path | None, typer.Option(help="Per-input results: a .csv or .json file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue with what is stored beside --out.")] = False,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Prove for each input that no perturbation of the threat changes its class.

    With --out, the run stores beside it what it has done. After a kill, run the same command with --resume.
    """
    limit = hf.threat(threat)
    check_table(out)
    options = dict(parse_option(text) for text in option or [])
    options |= {key: value for key, value in (("sigma", sigma), ("alpha", alpha)) if value is not None}
    if inputs is not None and samples is None and "n" in get("certify", method).options:
        samples = n  # as it was written before there was --samples: --inputs 8 --n 500
    if samples is not None:
        options["n"] = samples
    n = inputs or n or 500
    network, dataset = open_both(model, data, opening, root)
    samples_it = "counts" in get("certify", method).options
    kept = None if out is None else out.with_name(out.name + (".counts.npz" if samples_it else ".rows.json"))
    first = resume and kept is not None and samples_it and began_with_the_first(kept)
    taken = sample(dataset, n, first=first)
    how: dict[str, Any] = {"index": taken.index, "drawn": None if first else taken.drawn}
    how |= {"options": options, "counts_file" if samples_it else "rows_file": kept, "resume": resume}
    try:
        rows = certify_run(network, taken.x, taken.y, limit.select(taken.index), method, **how)
    except KeyboardInterrupt:
        where = (
            f"what is done is in {kept}. Go on: same command with --resume" if kept and kept.exists() else "none kept"
        )
        raise Interrupted(f"stopped; {where}") from None
    proved = sum(bool(row["certified"]) for row in rows)
    typer.echo(f"certified {proved} of {len(rows)} ({proved / len(rows):.1%}) at {limit} by '{method}'")
    if limit.name in BALLS:
        error, radius = one_shot(rows, limit.budget)
        typer.echo(f"certified error (CRE) {error:.1%}, mean certified radius (ACB) {radius:.4g} of {limit.budget:.4g}")
    typer.echo(f"inputs: {taken.drawn}")
    if "broken" in rows[0]:
        broken = sum(bool(row["broken"]) for row in rows)
        left = f"{len(rows) - proved - broken} are undecided" if proved + broken < len(rows) else "nothing is undecided"
        typer.echo(f"{broken} are broken by a counter-example, {left}")
    if "samples" in rows[0]:
        mean = sum(int(str(row["samples"])) for row in rows) / len(rows)
        typer.echo(f"each proof is wrong with probability {rows[0]['alpha']} at most; {mean:,.0f} samples per input")
    open_ = [row for row in rows if "worst_row" in row and not row["certified"]]
    for row in open_[:SHOWN]:
        name = dataset.classes[int(str(row["worst_class"]))]
        typer.echo(
            f"not proved: input {row['input']}, worst with the patch at row {row['worst_row']}, column "
            f"{row['worst_column']}, against class {name}"
        )
    if len(open_) > SHOWN:
        typer.echo(f"and {len(open_) - SHOWN} more without a proof{'' if out else '; --out FILE.csv has all'}")
    if out is not None:
        write_rows(out, rows)
        if kept is not None and not samples_it:
            kept.unlink(missing_ok=True)
        typer.echo(f"results: {out}")
