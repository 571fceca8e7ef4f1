"""`holdfast verify`: does a network have a property? Answers as in the verification competitions (VNN-COMP)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import HoldfastError, InputError
from holdfast.utils import clock

if TYPE_CHECKING:
    from holdfast.results import Verdict

app = typer.Typer(add_completion=False)


@app.command()
def verify(
    model: Annotated[Path, typer.Argument(help="Network: .onnx, .onnx.gz or .safetensors.")],
    prop: Annotated[Path, typer.Argument(metavar="PROPERTY", help="VNN-LIB file: .vnnlib or .vnnlib.gz.")],
    timeout: Annotated[float, typer.Option(help="Seconds for all of it, start-up included.")] = 60.0,
    results: Annotated[Path | None, typer.Option(help="Also write the answer to this file.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search for counter-examples.")] = 0,
) -> None:
    """Decide a property of a network: unsat (it holds), sat (with a counter-example), timeout or unknown."""
    start = clock.now()  # before torch is imported
    if not timeout > 0:
        raise InputError(f"--timeout {timeout:g}: expected a number of seconds > 0")
    from holdfast.utils.files import write_text

    try:
        verdict = _verdict(model, prop, start + timeout, seed)
    except HoldfastError:
        if results is not None:
            write_text(results, "error\n")
        raise
    word = {"holds": "unsat", "violated": "sat", "unknown": "timeout" if verdict.late else "unknown"}[verdict.status]
    answer = word + "\n"
    if verdict.counterexample is not None and verdict.output is not None:
        answer += assignment(verdict.counterexample.flatten().tolist(), verdict.output.tolist())
    if results is not None:
        write_text(results, answer)
    typer.echo(answer, nl=False)
    typer.echo(
        f"{verdict.seconds:.2f} s, {verdict.splits} sub-problems{verdict.note and ', ' + verdict.note}", err=True
    )


def _verdict(model: Path, prop: Path, deadline: float, seed: int) -> "Verdict":
    """Read both files and decide."""
    from holdfast.models import load_model
    from holdfast.properties import load_property
    from holdfast.properties.decide import verify as decide
    from holdfast.properties.replay import onnx_run

    asked, network, run = load_property(prop), load_model(model), onnx_run(model)
    left = max(deadline - clock.now(), 1e-3)
    return decide(network, asked, timeout=left, seed=seed, replays=() if run is None else (run,))


def assignment(inputs: list[float], outputs: list[float]) -> str:
    """Values of X and Y in the form of the competition.

    >>> print(assignment([0.5], [1.0, 2.0]), end="")
    ((X_0 0.5)
    (Y_0 1.0)
    (Y_1 2.0))
    """
    lines = [f"(X_{i} {value!r})" for i, value in enumerate(inputs)]
    lines += [f"(Y_{i} {value!r})" for i, value in enumerate(outputs)]
    return "(" + "\n".join(lines) + ")\n"
