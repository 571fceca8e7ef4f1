"""`holdfast bounds`: what each logit can become."""

from typing import Annotated

import typer
from rich.console import Console

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
    table,
)
from holdfast.data.draw import part_of
from holdfast.errors import InputError

app = typer.Typer(add_completion=False)
console = Console()


@app.command()
@opens_model
def bounds(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: ThreatOption = "linf:0.1",
    method: Annotated[str, typer.Option(help="Bounds (`holdfast methods bounds`).")] = "crown",
    index: Annotated[int, typer.Option("--input", min=0, help="Position of the test input.")] = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Show the range of each logit of one input under the threat."""
    limit = hf.threat(threat)
    network, dataset = open_both(model, data, opening, root)
    part = part_of(dataset)
    if index >= len(part):
        raise InputError(f"--input {index}: the test split has {len(part)} inputs")
    x = part.x[index : index + 1]
    result = hf.bounds(network, x, limit, method)
    logits = network(x)[0].tolist()
    rows = [
        [name, f"{z:.4f}", f"{low:.4f}", f"{high:.4f}", "label" if k == int(part.y[index]) else ""]
        for k, (name, z, low, high) in enumerate(
            zip(dataset.classes, logits, result.lower[0].tolist(), result.upper[0].tolist(), strict=True)
        )
    ]
    console.print(table(["class", "logit", "lower", "upper", ""], rows))
