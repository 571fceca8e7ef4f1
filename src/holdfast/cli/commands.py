"""The command line: thin commands on top of the Python functions of the same names."""

import csv
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Column, Table

import holdfast as hf
from holdfast.audits import load_audit, render
from holdfast.cli.common import (
    THREATS,
    ArchitectureOption,
    DataOption,
    ModelArgument,
    RootOption,
    SeedOption,
    ThreatOption,
    open_both,
)
from holdfast.cli.explain import app as explain_app
from holdfast.cli.methods import method_card
from holdfast.cli.serve import serve_command
from holdfast.cli.watermark import watermark_app
from holdfast.data import download, list_data
from holdfast.errors import HoldfastError, InputError, StorageError, did_you_mean
from holdfast.models import list_models
from holdfast.registry import KINDS, get
from holdfast.runs.attack_run import attack_run
from holdfast.runs.attack_summary import summary_table
from holdfast.runs.certify_run import certify_run, write_rows
from holdfast.runs.compare import compare as compare_runs
from holdfast.runs.compare import default_folder
from holdfast.training import Interrupted, list_recipes, parse_override

app = typer.Typer(
    name="holdfast",
    help="How far can an adversary push a neural network before it breaks, and what can be proved about it?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets: what there is, and how to get it.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(explain_app, name="explain")
app.add_typer(watermark_app, name="watermark")
app.command("serve")(serve_command)

console = Console()
FLOORS = ("certified", "attacked", "clean")
SMOOTHED_COPIES = 100  # of an audited model, in each look at it


def run_folder(*words: str) -> Path:
    """Return the default folder of a run."""
    return Path("runs") / "-".join(words).replace(":", "-").replace("/", "_")


@app.command()
def audit(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: Annotated[
        list[str] | None, typer.Option(help=f"{THREATS} linf:0.1 if not given; may be given several times.")
    ] = None,
    budget: Annotated[str, typer.Option(help="quick, standard, thorough, or a time: 90s, 10m, 2h.")] = "standard",
    n: Annotated[int, typer.Option("--n", help="Audit the first N test inputs.")] = 500,
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
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/audit-MODEL-THREAT if not given.")] = None,
    seed: SeedOption = 0,
    architecture: ArchitectureOption = None,
    root: RootOption = None,
) -> None:
    """Bracket the robust accuracy of a model between what attacks break and what proofs guarantee.

    After a kill, run the same command again: it continues where it stopped.
    """
    threats = threat or ["linf:0.1"]
    limits = [hf.threat(text) for text in threats]
    floors = [parse_floor(text) for text in fail_under or []]
    columns = dict(read_column(text) for text in group or [])
    network, dataset = open_both(model, data, architecture, root)
    folder = out or run_folder("audit", model.stem, *threats)
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
    )
    console.print(result.table())
    typer.echo(f"report: {folder / 'report.html'}")
    failed = [text for floor in floors for text in below(result, *floor)]
    for text in failed:
        typer.echo(f"failed: {text}", err=True)
    if failed:
        raise typer.Exit(1)


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


@app.command()
def attack(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: Annotated[str | None, typer.Option(help=f"{THREATS} linf:0.1 if not given.", show_default=False)] = None,
    minimum: Annotated[bool, typer.Option("--minimum", help="Find the nearest example; takes no --threat.")] = False,
    norm: Annotated[str | None, typer.Option(help="With --minimum: linf, l2 (default) or l1.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Attack (`holdfast methods attack`): cascade if not given; with --minimum: auto."),
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="Option of the attack: name=value, e.g. steps=20.")] = None,
    n: Annotated[int, typer.Option("--inputs", "--n", min=1, help="Attack the first N test inputs.")] = 500,
    seed: SeedOption = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/attack-MODEL-THREAT-METHOD if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    png: Annotated[
        bool, typer.Option("--png", help="Also write PNG files of the examples that survive rounding to 8 bits.")
    ] = False,
    architecture: ArchitectureOption = None,
    root: RootOption = None,
) -> None:
    """Find an adversarial example of each input, within a threat or as near as possible, and save it.

    After a kill, run the same command with --resume: it continues where it stopped.
    """
    if minimum and threat is not None:
        raise InputError("--minimum looks for the nearest example and has no --threat; give --norm linf, l2 or l1")
    if norm is not None and not minimum:
        raise InputError("--norm goes with --minimum; a --threat such as l2:0.5 names its norm itself")
    goal = (norm or "l2") if minimum else hf.threat(threat or "linf:0.1")
    method = method or ("auto" if minimum else "cascade")
    options = dict(parse_option(text) for text in option or [])
    network, dataset = open_both(model, data, architecture, root)
    folder = out or run_folder("attack", model.stem, *(("minimum",) if minimum else ()), str(goal), method)
    how: dict[str, Any] = {"options": options, "n": n, "seed": seed, "resume": resume, "png": png}
    try:
        run = attack_run(network, dataset, goal, method, out=folder, name=model.stem, **how)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; finished batches are in {folder}. Go on: same command with --resume") from None
    console.print(summary_table(run.summary))
    if png:
        pictures = run.summary["png"]
        outside = "" if minimum else f", {pictures['outside']} outside the threat"
        typer.echo(
            f"pictures: {pictures['written']} in {folder / 'png'}; "
            f"lost to 8 bits: {pictures['right_again']} classified right again{outside}"
        )
    typer.echo(f"results: {folder / 'results.csv'}")


def parse_option(text: str) -> tuple[str, Any]:
    """Parse `name=value`, an option of a method."""
    try:
        return parse_override(text)
    except InputError:
        raise InputError(f"cannot read the option '{text}'; write name=value, such as steps=20") from None


@app.command()
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
    architecture: ArchitectureOption = None,
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
    network, dataset = open_both(model, data, architecture, root)
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


@app.command()
def bounds(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: ThreatOption = "linf:0.1",
    method: Annotated[str, typer.Option(help="Bounds (`holdfast methods bounds`).")] = "crown",
    index: Annotated[int, typer.Option("--input", min=0, help="Position of the test input.")] = 0,
    architecture: ArchitectureOption = None,
    root: RootOption = None,
) -> None:
    """Show the range of each logit of one input under the threat."""
    limit = hf.threat(threat)
    network, dataset = open_both(model, data, architecture, root)
    if index >= len(dataset.test):
        raise InputError(f"--input {index}: the test split has {len(dataset.test)} inputs")
    x = dataset.test.x[index : index + 1]
    result = hf.bounds(network, x, limit, method)
    logits = network(x)[0].tolist()
    rows = [
        [name, f"{z:.4f}", f"{low:.4f}", f"{high:.4f}", "label" if k == int(dataset.test.y[index]) else ""]
        for k, (name, z, low, high) in enumerate(
            zip(dataset.classes, logits, result.lower[0].tolist(), result.upper[0].tolist(), strict=True)
        )
    ]
    console.print(_table(["class", "logit", "lower", "upper", ""], rows))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished audits.")],
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
) -> None:
    """Write one page that compares several audits."""
    page = render([load_audit(run) for run in runs])
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}") from error
    typer.echo(f"report: {out}")


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="Name of a recipe, or a TOML file.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override: key=value, e.g. epochs=3.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/RECIPE if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing run.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show the recipes that come with Holdfast.")] = False,
) -> None:
    """Train a model with a recipe."""
    if listing or recipe is None:
        rows = [[r.name, r.summary, r.threat or "none", r.needs] for r in list_recipes()]
        console.print(_table(["name", "what it is", "threat", "what it needs"], rows))
        return
    is_run = Path(recipe).is_dir()
    folder = out or (Path(recipe) if is_run and resume else Path("runs") / Path(recipe).stem)
    overrides = dict(parse_override(text) for text in settings or [])
    result = hf.train(recipe, out=folder, resume=resume, force=force, **overrides)
    shown = {key: value for key, value in result.history[-1].items() if isinstance(value, int | float)}
    typer.echo("  ".join(f"{key}={value:.4g}" for key, value in shown.items()))
    typer.echo(f"model: {folder / 'model.safetensors'}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished trainings.")],
    inputs: Annotated[int, typer.Option(min=1, help="Evaluate on the first N test inputs.")] = 500,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; runs/compare-HASH if not given.")] = None,
    data: Annotated[str | None, typer.Option(help="Data to evaluate on; the data of the recipes if not given.")] = None,
    threat: Annotated[str | None, typer.Option(help=f"{THREATS} The threat of the recipes if not given.")] = None,
    attack: Annotated[
        str, typer.Option(help="Attack to run besides PGD: autoattack, cascade (quicker) or none.")
    ] = "autoattack",
    force: Annotated[bool, typer.Option("--force", help="Replace another comparison in the folder.")] = False,
) -> None:
    """Compare finished trainings: clean and robust accuracy, time, memory, overfitting.

    After a kill, or with more runs and the same --out, run it again: it does only what is missing.
    """
    folder = out or default_folder(runs)
    try:
        result = compare_runs(runs, data=data, threat=threat, attack=attack, inputs=inputs, out=folder, force=force)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; finished batches are in {folder}. Go on: same command") from None
    console.print(result.table())
    typer.echo(f"table: {folder / 'compare.md'}")
    typer.echo(f"plot: {folder / 'compare.svg'}")


@app.command()
def methods(
    kind: Annotated[str | None, typer.Argument(help=f"One of {', '.join(KINDS)}.")] = None,
    name: Annotated[str | None, typer.Argument(help="Show this method in full, with its options.")] = None,
) -> None:
    """List the methods: what each does, what it guarantees, for which threats."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"unknown kind '{kind}'; expected one of {', '.join(KINDS)}")
    if kind is not None and name is not None:
        console.print(method_card(get(kind, name)))
        return
    rows = [[m.kind, m.name, m.summary, m.guarantee, " ".join(m.threats), m.reference] for m in hf.methods(kind)]
    console.print(_table(["kind", "name", "what it does", "guarantee", "threats", "reference"], rows))


@app.command()
def models() -> None:
    """List the architectures that `make_model` and recipes know."""
    rows = [[m.name, f"{m.parameters:,}", m.summary] for m in list_models()]
    console.print(_table(["name", "parameters", "what it is"], rows))


@data_app.command("list")
def data_list(root: RootOption = None) -> None:
    """List the data sets, and which of them are on this machine."""
    rows = [
        [d.name, d.summary, f"{d.size / 1e6:.0f} MB" if d.size else "-", d.license, "yes" if d.present else "no"]
        for d in list_data(root=root)
    ]
    console.print(_table(["name", "what it is", "size", "license", "here"], rows))


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="Name of the data set.")],
    root: RootOption = None,
    mirror: Annotated[
        str | None, typer.Option(help="Base address to fetch from instead of the canonical host.")
    ] = None,
) -> None:
    """Download a data set from its canonical host, resuming unfinished files and checking every checksum."""
    typer.echo(f"{name}: {download(name, root=root, mirror=mirror)}")


def _table(columns: list[str], rows: list[list[str]]) -> Table:
    named = [Column(name, no_wrap=name == "name") for name in columns]
    table = Table(*named, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def main() -> None:
    """Entry point: an error of our own becomes one line and exit code 2, never a traceback."""
    try:
        app()
    except Interrupted as error:
        typer.echo(str(error), err=True)
        sys.exit(130)
    except (HoldfastError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
