"""`holdfast certify`: proofs, input by input."""

from pathlib import Path
from typing import Annotated

import typer

import holdfast as hf
from holdfast.cli.common import (
    AS_IT_IS,
    DataOption,
    ModelArgument,
    Opening,
    RootOption,
    ThreatOption,
    open_both,
    opens_model,
    parse_option,
)
from holdfast.errors import InputError, Interrupted
from holdfast.registry import get
from holdfast.runs.certify_run import certify_run, write_rows

app = typer.Typer(add_completion=False)


@app.command()
@opens_model
def certify(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: ThreatOption = "linf:0.1",
    method: Annotated[str, typer.Option(help="Certificate (`holdfast methods certify`).")] = "auto",
    inputs: Annotated[int, typer.Option(min=1, help="Certify the first N test inputs.")] = 500,
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            min=1,
            help="Largest number of samples per input, for methods that sample; otherwise the same as --inputs.",
        ),
    ] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise of smoothing; use the noise of training.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Probability of a wrong proof, for methods that sample.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Option of the method: name=value, e.g. seed=1.")] = None,
    out: Annotated[Path | None, typer.Option(help="Per-input results: a .csv or .json file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue with the samples stored beside --out.")] = False,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Prove for each input that no perturbation of the threat changes its class.

    Methods that sample store their samples beside --out. After a kill, run the same command with --resume.
    """
    limit = hf.threat(threat)
    if out is not None and out.suffix not in (".csv", ".json"):
        raise InputError(f"--out must end in .csv or .json, got '{out}'")
    options = dict(parse_option(text) for text in option or [])
    options |= {key: value for key, value in (("sigma", sigma), ("alpha", alpha)) if value is not None}
    if n is not None and "n" in get("certify", method).options:
        options["n"] = n
    elif n is not None:
        inputs = n
    network, dataset = open_both(model, data, opening, root)
    x, y = dataset.test.x[:inputs], dataset.test.y[:inputs]
    kept = None if out is None else out.with_name(out.name + ".counts.npz")
    try:
        rows = certify_run(network, x, y, limit, method, options=options, counts_file=kept, resume=resume)
    except KeyboardInterrupt:
        where = f"samples are in {kept}. Go on: same command with --resume" if kept and kept.exists() else "none kept"
        raise Interrupted(f"stopped; {where}") from None
    proved = sum(bool(row["certified"]) for row in rows)
    typer.echo(f"certified {proved} of {len(rows)} ({proved / len(rows):.1%}) at {limit} by '{method}'")
    if "samples" in rows[0]:
        mean = sum(int(str(row["samples"])) for row in rows) / len(rows)
        typer.echo(f"each proof is wrong with probability {rows[0]['alpha']} at most; {mean:,.0f} samples per input")
    if out is not None:
        write_rows(out, rows)
        typer.echo(f"results: {out}")
