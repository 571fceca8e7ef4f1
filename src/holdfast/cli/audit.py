"""`holdfast audit`: the bracket of a model."""

import csv
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import holdfast as hf
from holdfast.analyze.shift import shifted_accuracy
from holdfast.cli.common import (
    AS_IT_IS,
    THREATS,
    DataOption,
    InputsOption,
    ModelArgument,
    Opening,
    RootOption,
    SeedOption,
    may_be_quiet,
    open_both,
    opens_model,
    root_words,
    run_folder,
    table,
)
from holdfast.data import Dataset, Split
from holdfast.data.corruptions import check_images
from holdfast.errors import InputError, did_you_mean

app = typer.Typer(add_completion=False)
console = Console()
SMOOTHED_COPIES = 100  # of an audited model, in each look at it
FLOORS = ("certified", "attacked", "clean")


@app.command()
@may_be_quiet
@opens_model
def audit(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: Annotated[
        list[str] | None, typer.Option(help=f"{THREATS} linf:0.1 if not given; may be given several times.")
    ] = None,
    budget: Annotated[str, typer.Option(help="quick, standard, thorough, or a time: 90s, 10m, 2h.")] = "standard",
    n: InputsOption = 500,
    budgets: Annotated[int, typer.Option(help="Number of budgets to report, up to the budget of the threat.")] = 5,
    attack: Annotated[
        str | None, typer.Option(help="Run only this attack (`holdfast methods attack`); with --sigma: pgd.")
    ] = None,
    certify: Annotated[
        str | None,
        typer.Option(help="Run only this certificate (`holdfast methods certify`), or none; with --sigma: smoothing."),
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option(help="Split the results by FILE.csv:COLUMN, one row for each test input.")
    ] = None,
    fail_under: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with code 1 if a share is lower, for any threat: certified=0.8, attacked=0.9, clean=0.95."
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray to spread the work over a cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster; started here if not given.")] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Audit the model smoothed with this noise; train it with the same noise.")
    ] = None,
    shift: Annotated[
        bool, typer.Option("--shift", help="Add accuracies on shifted data: 15 corruptions at 5 severities.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/audit-MODEL-DATA-THREAT-BUDGET-N if not given.")
    ] = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Bracket the robust accuracy of a model between what attacks break and what proofs guarantee.

    After a kill, run the same command again: it continues where it stopped.
    """
    threats = threat or ["linf:0.1"]
    limits = [hf.threat(text) for text in threats]
    floors = [parse_floor(text) for text in fail_under or []]
    columns = dict(read_column(text) for text in group or [])
    network, dataset = open_both(model, data, opening, root)
    rare = (attack, certify, group, sigma, root, seed or None, opening.words or None, None if budgets == 5 else budgets)
    folder = out or audit_folder(model, data, threats, budget, n, rare)
    if shift:
        check_images(_audited(dataset).x)
    if sigma is not None:  # each look at the smoothed model costs as many passes as it has copies
        network = hf.Smoothed(network, sigma, n=SMOOTHED_COPIES).eval()
    result = hf.audit(
        network,
        dataset,
        limits,
        budget=budget,
        n=n,
        budgets=budgets,
        attack=attack,
        certify=None if certify == "none" else certify or "auto",
        groups=columns,
        out=folder,
        seed=seed,
        name=model.stem,
        engine=cast(Any, engine),
        address=address,
        source={
            "model": [str(model), *opening.words],
            "data": ["--data", data, *root_words(root)],
            "audit": [] if sigma is None else ["--sigma", f"{sigma:g}"],
        },
    )
    if shift:
        result = with_shift(result, network, dataset, seed)
        result.save(folder)
    console.print(result.table())
    if shift:
        console.print(shift_table(result.settings["shift"]))
    typer.echo(f"report: {folder / 'report.html'}")
    failed = [text for floor in floors for text in below(result, *floor)]
    for text in failed:
        typer.echo(f"failed: {text}", err=True)
    if failed:
        raise typer.Exit(1)


def with_shift(result: hf.Audit, network: nn.Module, dataset: Dataset, seed: int) -> hf.Audit:
    """Return the audit with the accuracies on corruptions of the inputs that it audited, in `settings["shift"]`."""
    split = _audited(dataset)
    chosen = torch.tensor([record.position for record in result.records])
    found = shifted_accuracy(network, split.x[chosen], split.y[chosen], seed=seed)
    return replace(result, settings={**result.settings, "shift": found.to_dict()})


def _audited(dataset: Dataset) -> Split:
    """The inputs that an audit draws from."""
    return dataset.test if dataset.whole is None else dataset.whole


def shift_table(shift: Mapping[str, Any]) -> Table:
    """Lay out the accuracies by corruption and severity, in percent."""
    rows = {row["corruption"]: list[str]() for row in shift["rows"]}
    for row in shift["rows"]:
        rows[row["corruption"]].append(f"{100 * row['accuracy']:.1f}")
    found = table(
        ["shifted data", *(f"severity {severity}" for severity in shift["severities"])],
        [[name, *values] for name, values in rows.items()],
    )
    found.caption = f"mean corruption error {100 * shift['mean_corruption_error']:.1f} %"
    return found


def audit_folder(model: Path, data: str, threats: list[str], budget: str, n: int, rare: tuple[Any, ...]) -> Path:
    """Return the default folder of an audit: one for each model, data, threats and settings.

    Settings that are seldom given are told apart by a checksum; a setting that is not given is None.

    >>> str(audit_folder(Path("runs/at/model.safetensors"), "mnist", ["linf:8/255"], "quick", 9, (None, None)))
    'runs/audit-at-mnist-linf-8_255-quick-9'
    """
    folder = model.parent.name
    name = folder if folder and model.name == "model.safetensors" else "-".join(filter(None, (folder, model.stem)))
    given = any(setting is not None for setting in rare)
    rest = [hashlib.sha256(repr(rare).encode()).hexdigest()[:6]] if given else []
    return run_folder("audit", name, data.strip("./") or "data", *threats, budget, str(n), *rest)


def parse_floor(text: str) -> tuple[str, float]:
    """Parse `certified=0.8` into name and share."""
    name, _, share = text.partition("=")
    try:
        value = float(share)
    except ValueError:
        value = -1.0
    if name not in FLOORS or not 0 <= value <= 1:
        raise InputError(f"cannot read --fail-under '{text}'; write certified=0.8, attacked=0.8 or clean=0.8")
    return name, value


def below(result: hf.Audit, name: str, floor: float) -> list[str]:
    """List the threats whose share is below the floor, one sentence each."""
    if name == "clean":
        return [] if result.clean >= floor else [f"clean accuracy {result.clean:.4f} is below {floor:g}"]
    found = ((bracket.threat, getattr(bracket, name)[-1]) for bracket in result.brackets)
    return [f"{name} accuracy {value:.4f} at {threat} is below {floor:g}" for threat, value in found if value < floor]


def read_column(text: str) -> tuple[str, list[str]]:
    """Read `FILE.csv:COLUMN` into the name of the column and its values."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise InputError(f"cannot read --group '{text}'; write FILE.csv:COLUMN")
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read --group '{text}': {error}") from error
    known = list(rows[0]) if rows else []
    if name not in known:
        raise InputError(f"'{path}' has no column '{name}'. " + did_you_mean(name, known))
    return name, [row[name] or "" for row in rows]
