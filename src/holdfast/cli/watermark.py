"""`holdfast watermark`: embed a watermark, certify it, verify ownership, try to remove it."""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from holdfast.apps.watermark import (
    TOOLBOX,
    AttackLog,
    Criterion,
    EmbedOptions,
    TriggerSet,
    abstract_images,
    certify_watermark,
    content_triggers,
    embed,
    load_triggers,
    noise_triggers,
    parameter_pgd,
    removal_time,
    save_triggers,
    unrelated_triggers,
    verify_black_box,
    verify_white_box,
)
from holdfast.apps.watermark.certificate import check_reach
from holdfast.apps.watermark.certificate_files import count_copies, read_certificate
from holdfast.apps.watermark.triggers import SCHEMES
from holdfast.cli.common import (
    ArchitectureOption,
    DataOption,
    ModelArgument,
    OldCopiesOption,
    RootOption,
    SeedOption,
    may_be_quiet,
)
from holdfast.data import Dataset, Split, load_data, split_validation
from holdfast.errors import InputError, Interrupted, StorageError, did_you_mean
from holdfast.models import load_model, make_model, save_model
from holdfast.utils.files import write_text
from holdfast.utils.hashes import hash_model, hash_tensors

app = typer.Typer(add_completion=False, help="Watermarks in the weights, with a certificate.", no_args_is_help=True)
console = Console()
PGD = "parameter-pgd"

TriggersArgument = Annotated[Path, typer.Argument(help="Trigger set that `watermark embed` wrote: triggers.npz.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the files of an earlier run.")]
HalfOption = Annotated[
    bool, typer.Option("--half/--all", help="Give owner and attacker one half of the training data each, or all of it.")
]
CopiesOption = Annotated[int, typer.Option("--samples", min=1, help="Number of noisy copies of the weights.")]
SigmaOption = Annotated[float, typer.Option(help="Standard deviation of the noise on the weights.")]


@app.command("embed")
@may_be_quiet
def embed_command(
    model: Annotated[Path | None, typer.Argument(help="Model to start from; a new one if not given.")] = None,
    data: DataOption = "mnist-mini",
    architecture: Annotated[
        str, typer.Option(help="Architecture of a new model, or of a file of weights.")
    ] = "small-star",
    scheme: Annotated[str, typer.Option(help=f"Triggers: {', '.join(SCHEMES)}.")] = "content",
    text: Annotated[str, typer.Option(help="Text of the scheme content.")] = "OWNER",
    other: Annotated[
        str | None, typer.Option(help="Data for the scheme unrelated; abstract patterns if not given.")
    ] = None,
    label: Annotated[int, typer.Option(help="Label of all triggers; -1 draws one for each.")] = 4,
    triggers: Annotated[int, typer.Option(help="Number of triggers.")] = 100,
    noise: Annotated[float, typer.Option(help="Largest noise on the weights; 0 is the usual backdoor.")] = 0.3,
    levels: Annotated[int, typer.Option(help="Number of noise levels.")] = 4,
    samples: Annotated[int, typer.Option(help="Draws at each level.")] = 4,
    per_level: Annotated[bool, typer.Option(help="Take one step for each level, or one for all.")] = True,
    warm_up: Annotated[int, typer.Option(help="Epochs without noise at the start.")] = 1,
    epochs: Annotated[int, typer.Option(help="Epochs of training.")] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate of SGD.")] = 0.05,
    batch_size: Annotated[int, typer.Option(help="Batch size of training.")] = 64,
    trigger_batch: Annotated[int, typer.Option(help="Triggers for each step under noise.")] = 25,
    clip_norm: Annotated[float, typer.Option(help="Largest norm of a gradient.")] = 1.0,
    half: HalfOption = True,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/watermark"),
    seed: SeedOption = 0,
    force: ForceOption = False,
    root: RootOption = None,
) -> None:
    """Train a model that answers secret triggers as told, even under noise on its weights."""
    free(out, ("model.safetensors", "triggers.npz", "history.csv", "embed.json"), force)
    dataset = load_data(data, root=root)
    split = halves(dataset, half)[0]
    options = EmbedOptions(
        noise=noise,
        levels=levels,
        samples=samples,
        step_per_level=per_level,
        warm_up=warm_up,
        epochs=epochs,
        lr=lr,
        batch_size=batch_size,
        drop_every=max(1, round(0.75 * epochs)),
        trigger_batch=trigger_batch,
        clip_norm=clip_norm,
    )
    secret = make_triggers(scheme, dataset, split, text, other, None if label < 0 else label, triggers, seed, root)
    start = open_model(model, architecture, dataset, seed)
    marked, history = embed(start, split.x, split.y, secret, options, seed=seed, show=True)
    save_triggers(secret, out / "triggers.npz", force=force)
    save_model(marked, out / "model.safetensors", watermark={"noise": noise, "seed": seed})
    write_text(out / "history.csv", rows_text(history))
    write_text(
        out / "embed.json",
        json.dumps({"data": data, "seed": seed, "half": half, **asdict(options)}, indent=1, sort_keys=True),
    )
    console.print(f"loss {history[-1]['loss']:.4f}, triggers under noise {history[-1]['noisy_trigger_loss']:.4f}")
    typer.echo(f"model: {out / 'model.safetensors'}\ntriggers (keep them secret): {out / 'triggers.npz'}")


@app.command("certify")
@may_be_quiet
def certify_command(
    model: ModelArgument,
    triggers: TriggersArgument,
    sigma: SigmaOption = 0.3,
    radius: Annotated[
        list[float] | None, typer.Option(help="l2 radius in the weights; may be given several times.")
    ] = None,
    samples: CopiesOption = 10_000,
    n: OldCopiesOption = None,
    confidence: Annotated[float, typer.Option(help="Confidence of each radius.")] = 0.99,
    union: Annotated[bool, typer.Option("--union", help="Apply the confidence to all radii together.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/watermark-certify"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue with the copies in the folder.")] = False,
    seed: SeedOption = 0,
    force: ForceOption = False,
    architecture: ArchitectureOption = None,
) -> None:
    """Prove that no change of the weights within a radius lowers the trigger accuracy below a value."""
    free(out, ("certificate.json", *(() if resume else ("copies.txt",))), force)
    secret = load_triggers(triggers)
    network = open_model(model, architecture, secret, None)
    radii = radius or [0.2, 0.4, 0.5]
    samples = n or samples
    check_reach(radii, sigma=sigma, n=samples, confidence=confidence, union=union)
    key = hash_tensors({"model": hash_model(network), "x": secret.x, "y": secret.y})
    try:
        right = count_copies(out / "copies.txt", key, network, secret, sigma=sigma, n=samples, seed=seed, resume=resume)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; finished copies are in {out}. Go on: same command with --resume") from None
    how: dict[str, Any] = {"sigma": sigma, "n": samples, "confidence": confidence, "union": union, "seed": seed}
    certificate = certify_watermark(network, secret, radii, **how, right=right)
    write_text(out / "certificate.json", json.dumps(certificate.to_json(), sort_keys=True))
    pairs = zip(certificate.radii, certificate.certified, strict=True)
    show(("weight radius", "certified trigger accuracy"), [(f"{r:g}", f"{value:.1%}") for r, value in pairs])
    typer.echo(
        f"median under noise {certificate.median:.1%}, without noise {certificate.accuracy:.1%}; sigma {sigma:g}, "
        f"{samples} copies, {len(secret)} triggers, confidence {confidence:g} "
        f"{'of all radii' if union else 'of each radius'}"
    )
    typer.echo(f"{certificate.scope}\ncertificate: {out / 'certificate.json'}")


@app.command("verify")
@may_be_quiet
def verify_command(
    model: ModelArgument,
    triggers: TriggersArgument,
    sigma: Annotated[float | None, typer.Option(help="Noise of the white-box test; no such test if not given.")] = None,
    samples: CopiesOption = 1000,
    n: OldCopiesOption = None,
    original: Annotated[Path | None, typer.Option(help="The owner's model, to measure the distance.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="certificate.json of the original.")] = None,
    false_claim: Annotated[float, typer.Option(help="Largest p-value to claim ownership.")] = 1e-6,
    seed: SeedOption = 0,
    architecture: ArchitectureOption = None,
) -> None:
    """Say whether a suspect model carries the watermark, by its answers and by its weights."""
    if sigma is None and (original is not None or certificate is not None):
        raise InputError("--original and --certificate belong to the white-box test; give --sigma as well")
    secret = load_triggers(triggers)
    suspect = open_model(model, architecture, secret, None)
    verdicts = [verify_black_box(suspect, secret, false_claim=false_claim)]
    if sigma is not None:
        owner = None if original is None else open_model(original, architecture, secret, None)
        proof = None if certificate is None else read_certificate(certificate)
        how: dict[str, Any] = {"false_claim": false_claim, "original": owner, "certificate": proof, "show": True}
        verdicts.append(verify_white_box(suspect, secret, sigma=sigma, n=n or samples, seed=seed, **how))
    rows = []
    for v in verdicts:
        numbers = ["-" if value is None else f"{value:.3g}" for value in (v.distance, v.certified)]
        claim = "owned" if v.claim else "not shown"
        rows.append((v.mode, claim, f"{v.accuracy:.1%}", f"{v.threshold:.1%}", f"{v.p_value:.1e}", *numbers))
    show(("test", "verdict", "trigger accuracy", "threshold", "p-value", "distance", "certified there"), rows)
    if not secret.random_labels:
        typer.echo("All triggers have chosen labels: the p-value assumes that an independent model guesses at random.")


@app.command("attack")
@may_be_quiet
def attack_command(
    model: ModelArgument,
    triggers: TriggersArgument,
    data: DataOption = "mnist-mini",
    method: Annotated[str, typer.Option(help=f"{', '.join(TOOLBOX)}, {PGD}.")] = "ftal",
    epochs: Annotated[int, typer.Option(min=0, help="Epochs of training.")] = 5,
    lr: Annotated[
        list[float] | None, typer.Option(help="Learning rate of Adam, 1e-3 if not given; once for each rate to try.")
    ] = None,
    radius: Annotated[float, typer.Option(help=f"Radius of {PGD}, which knows the triggers.")] = 0.5,
    sigma: SigmaOption = 0.3,
    samples: CopiesOption = 100,
    n: OldCopiesOption = None,
    loss: Annotated[float, typer.Option(help="Clean accuracy that the attacker may lose.")] = 0.05,
    threshold: Annotated[float, typer.Option(help="Trigger accuracy below which the watermark is gone.")] = 0.3,
    half: HalfOption = True,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/watermark-METHOD if not given.")] = None,
    seed: SeedOption = 0,
    force: ForceOption = False,
    architecture: ArchitectureOption = None,
    root: RootOption = None,
) -> None:
    """Try to remove the watermark; the model file stays as it is."""
    if method not in TOOLBOX and method != PGD:
        raise InputError(f"unknown attack '{method}'. " + did_you_mean(method, [*TOOLBOX, PGD]))
    folder, rates = out or Path("runs") / f"watermark-{method}", (lr or [1e-3]) if method != PGD else [0.0]
    places = {rate: folder / f"lr-{rate:g}" if len(rates) > 1 else folder for rate in rates}
    for place in places.values():
        free(place, ("attacked.safetensors", "log.csv"), force)
    dataset, secret = load_data(data, root=root), load_triggers(triggers)
    network = open_model(model, architecture, dataset, None)
    split = halves(dataset, half)[1]
    for rate, place in places.items():
        log = AttackLog(network, dataset.test.x, dataset.test.y, secret, sigma=sigma, n=n or samples, seed=seed)
        if method == PGD:
            attacked = parameter_pgd(network, secret.x, secret.y, radius, sigma=sigma, samples=4, seed=seed)
            log.watch(attacked)
        else:
            attacked = TOOLBOX[method](network, split.x, split.y, epochs=epochs, lr=rate, seed=seed, watch=log.watch)
        write_text(place / "log.csv", rows_text([asdict(row) for row in log.rows]))
        save_model(attacked, place / "attacked.safetensors", attack=method)
        if place != folder:
            typer.echo(f"learning rate {rate:g}")
        show_attack(log, Criterion(log.rows[0].test_accuracy - loss, threshold))
        typer.echo(f"log: {place / 'log.csv'}")


def show_attack(log: AttackLog, criterion: Criterion) -> None:
    """A row for each epoch, and when the watermark was removed."""
    rows = [
        (
            r.epoch,
            f"{r.seconds:.1f}",
            *(f"{v:.1%}" for v in (r.test_accuracy, r.black_box, r.white_box)),
            f"{r.distance:.3g}",
        )
        for r in log.rows
    ]
    show(("epoch", "seconds", "test accuracy", "black-box", "white-box", "distance"), rows)
    for name, white in (("black-box", False), ("white-box", True)):
        when = removal_time(log.rows, criterion, white_box=white)
        done = "not removed" if when is None else f"removed after {when:.1f} s" if when else "not there to begin with"
        typer.echo(f"{name}: {done}")


def make_triggers(
    scheme: str,
    dataset: Dataset,
    split: Split,
    text: str,
    other: str | None,
    label: int | None,
    count: int,
    seed: int,
    root: Path | None,
) -> TriggerSet:
    """Make the trigger set for `embed`; ordinary images come from the owner's training data."""
    classes, shape = len(dataset.classes), tuple(split.x.shape[1:])
    how: dict[str, Any] = {"label": label, "count": count, "seed": seed}
    if scheme == "content":
        return content_triggers(split, classes, text=text, **how)
    if scheme == "noise":
        return noise_triggers(split, classes, **how)
    if scheme != "unrelated":
        raise InputError(f"unknown scheme '{scheme}'. " + did_you_mean(scheme, SCHEMES))
    images = abstract_images(count, shape, seed=seed) if other is None else load_data(other, root=root).train.x
    return unrelated_triggers(images, shape, classes, **how)


def open_model(path: Path | None, architecture: str | None, like: Dataset | TriggerSet, seed: int | None) -> nn.Module:
    """Load a model, or make a new one without a file; shape and classes come from the data or the triggers."""
    if architecture is None:
        assert path is not None
        return load_model(path)
    x, classes = (like.test.x, len(like.classes)) if isinstance(like, Dataset) else (like.x, like.classes)
    new = make_model(architecture, input_shape=tuple(x.shape[1:]), classes=classes, seed=seed)
    return new if path is None else load_model(path, new)


def halves(dataset: Dataset, half: bool) -> tuple[Split, Split]:
    """Split the training data between owner and attacker: fixed halves of each class, or all of it for both."""
    return split_validation(dataset.train, 0.5) if half else (dataset.train, dataset.train)


def free(folder: Path, names: tuple[str, ...], force: bool) -> None:
    """Create the folder; refuse to replace a file in it without `force`."""
    found = [name for name in names if (folder / name).exists()]
    if found and not force:
        raise InputError(f"{folder / found[0]} is there already; choose another folder (--out) or use --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder {folder}: {error.strerror or error}") from error


def rows_text(rows: list[dict[str, Any]]) -> str:
    """Format rows as CSV."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def show(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print a plain table."""
    table = Table(*header, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
