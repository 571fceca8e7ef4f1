"""Finished training runs side by side: the same test inputs, the same adversary, one table and one plot.

compare.json, .csv, .md    the table, with every number and as shown
compare.svg                the plot
results/KEY.json           what broke each input of one model, batch by batch: all that going on after a kill needs
"""

import csv
import hashlib
import json
import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from holdfast.attacks import attack as run_attack
from holdfast.audits.inputs import exact_text, to_model
from holdfast.checks import check_inputs, check_logits
from holdfast.data import Dataset, load_data
from holdfast.errors import HoldfastError, InputError, StorageError, did_you_mean
from holdfast.models import load_model
from holdfast.registry import get
from holdfast.runs.compare_plot import FILES, STEPS, Comparison, Row, Score
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.training import folder as files
from holdfast.training.recipe.recipe import load_recipe
from holdfast.utils.hashes import hash_tensors
from holdfast.utils.limits import parse_json, read_text, without_recursion
from holdfast.utils.progress import progress_bars

ATTACKS = ("autoattack", "cascade", "none")
RESULTS = "results"
_BATCH = 100  # inputs attacked, and stored, at a time; the answer does not depend on it
_SEED = 0
_NEEDED = ("epoch", "seconds")
_READ = (*_NEEDED, "images_per_second", "peak_memory_mb", "validation_clean", "validation_robust")

Settings = dict[str, Any]
Broken = dict[str, list[str]]
"""For each attack, what broke each input: "clean" where it is misclassified unchanged, "" where it held."""


@dataclass(frozen=True)
class Run:
    """A finished run as its folder tells it; `model` is the sha256 of the model file."""

    folder: Path
    name: str
    recipe: Mapping[str, Any]
    data: str | None
    history: tuple[Mapping[str, float], ...]
    model: str


def compare(
    runs: Sequence[str | Path],
    *,
    data: Dataset | str | None = None,
    threat: Threat | str | None = None,
    attack: str = "autoattack",
    inputs: int = 500,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
) -> Comparison:
    """Judges the models of finished runs by the same test inputs and the same adversary.

    Args:
        runs: folders that `train(out=...)` wrote.
        data: a data set or its name; by default that of the recipes, which must then agree.
        threat: what the adversary may do, at test time; by default that of the recipes, which must then agree.
        attack: beside PGD with 40 steps: "autoattack", the quicker "cascade", or "none".
        inputs: judge by the first so many inputs of the test split, or by all of them if there are fewer.
        out: folder of the comparison. Results are stored there as they come; a second call does only what is missing.
        force: replace another comparison that is in `out`.
        progress: show bars, if the error output is a terminal.
    """
    if attack not in ATTACKS:
        raise InputError(f"unknown attack '{attack}' to compare by. " + did_you_mean(attack, ATTACKS))
    if inputs < 1:
        raise InputError(f"inputs must be at least 1, got {inputs}")
    opened = read_runs(runs)
    limit = _threat(opened, threat)
    attacks: dict[str, dict[str, Any]] = {"pgd": {"steps": STEPS}, **({} if attack == "none" else {attack: {}})}
    for method in attacks:
        get("attack", method).check(limit, {})
    dataset = _data(opened, data)
    x, y = dataset.test.x[:inputs], dataset.test.y[:inputs]
    check_inputs(x, limit.low, limit.high)
    _check_models(opened, dataset, given=data is not None)
    settings: Settings = {
        "data": hash_tensors({"x": x, "y": y}),
        "inputs": len(x),
        "threat": exact_text(limit),
        "attacks": attacks,
        "seed": _SEED,
        "holdfast": version("holdfast"),
    }
    keys = [_hash({"model": run.model, **settings})[:16] for run in opened]
    folder = None if out is None else Path(out)
    if folder is not None:
        _check_free(folder, settings, keys, force=force)
    rows = []
    with progress_bars(progress) as bars:
        for run, key in zip(opened, keys, strict=True):
            store = None if folder is None else folder / RESULTS / f"{key}.json"
            rows.append(_row(run, key, _judge(run, x, y, limit, attacks, store, bars)))
    result = Comparison(tuple(rows), dataset.name, str(limit), attack, len(x), settings)
    if folder is not None:
        result.save(folder)
    return result


def default_folder(runs: Sequence[str | Path]) -> Path:
    """Where a comparison goes if no folder is named: the same for the same models, in any order."""
    return Path("runs") / f"compare-{_hash(sorted(run.model for run in read_runs(runs)))[:8]}"


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs, each checked to be whole and finished; refused if one is given twice."""
    if not folders:
        raise InputError("give at least one folder of a finished run to compare, got none")
    paths = [Path(folder) for folder in folders]
    places = [path.resolve() for path in paths]
    for i, place in enumerate(places):
        if place in places[:i]:
            raise InputError(f"the run '{paths[i]}' is given twice ('{paths[places.index(place)]}'); give it once")
    short = [place.name for place in places]
    names = [s if short.count(s) == 1 else str(path) for s, path in zip(short, paths, strict=True)]
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _read_run(folder: Path, name: str) -> Run:
    if not (folder / files.RECIPE).is_file():
        raise InputError(
            f"there is no training run in '{folder}': '{files.RECIPE}' is missing; "
            "give a folder that `holdfast train --out` wrote"
        )
    way_out = f"Finish it: {shlex.join(['holdfast', 'train', str(folder), '--resume'])}"
    if not (folder / files.MODEL).is_file():
        raise InputError(f"the run in '{folder}' is not finished: '{files.MODEL}' is missing. {way_out}")
    recipe = _table(folder / files.RECIPE, tomllib.loads)
    about = _table(folder / files.RUN, parse_json)
    history = _history(folder / files.HISTORY)
    planned, done = recipe.get("epochs"), int(history[-1]["epoch"])
    # A run that was resumed for more epochs still has the old model; one with patience may end early.
    if isinstance(planned, int) and done < planned and "patience" not in _part(recipe, "evaluate"):
        raise InputError(f"the run in '{folder}' is not finished: it is at epoch {done} of {planned}. {way_out}")
    data = recipe.get("data", about.get("data"))
    with (folder / files.MODEL).open("rb") as file:
        model = hashlib.file_digest(file, "sha256").hexdigest()
    # Folders can be called anything; a table and an SVG cannot show everything.
    shown = "".join(c if c.isprintable() else "?" for c in name)
    return Run(folder, shown, recipe, None if data is None else str(data), history, model)


def _table(path: Path, read: Any) -> dict[str, Any]:
    """A TOML or JSON file whose top level is a table."""
    try:
        text = read_text(path)
        table = without_recursion(lambda: read(text))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(table, dict):
        raise _damaged(path, f"expected a table, got {type(table).__name__}")
    return table


def _history(path: Path) -> tuple[dict[str, float], ...]:
    """One row per epoch, of the columns that are read here; an empty cell is left out."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise _damaged(path, str(error)) from error
    rows = []
    for number, line in enumerate(lines, 2):
        try:
            row = {key: float(line[key]) for key in _READ if line.get(key) or key in _NEEDED}
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"line {number}: {type(error).__name__}: {error}") from error
        if None in line or None in line.values() or not all(map(math.isfinite, row.values())):
            raise _damaged(path, f"line {number} has too few, too many or infinite values")
        rows.append(row)
    if not rows:
        raise _damaged(path, "it has no epochs")
    return tuple(rows)


def _damaged(path: Path, reason: str) -> StorageError:
    return StorageError(f"cannot read '{path}': {reason}. Restore it from a copy, or train the run again.")


def _threat(runs: Sequence[Run], given: Threat | str | None) -> Threat:
    """The threat that was given, or the one that all recipes share."""
    threats: dict[str, Threat] = {}
    for run in runs if given is None else ():
        text = run.recipe.get("threat")
        if not isinstance(text, str):
            raise InputError(f"the run '{run.name}' has no threat; choose one for all runs: --threat linf:0.1")
        threats[run.name] = read_threat(text)
    if len(set(threats.values())) > 1:
        listed = ", ".join(f"{name}: {threat}" for name, threat in threats.items())
        raise InputError(f"the runs have different threats ({listed}); choose one for all of them: --threat linf:0.1")
    threat = next(iter(threats.values())) if given is None else read_threat(given) if isinstance(given, str) else given
    if threat.budget <= 0:
        raise InputError(f"the threat '{threat}' allows no change at all; give a budget above zero")
    return threat


def _data(runs: Sequence[Run], given: Dataset | str | None) -> Dataset:
    """The data that were given, or those that all recipes name."""
    if given is not None:
        return given if isinstance(given, Dataset) else load_data(given)
    names = {run.name: run.data for run in runs}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{run}: {name}" for run, name in names.items())
        raise InputError(f"the runs have different data ({listed}); choose those to judge all of them by: --data NAME")
    name = runs[0].data
    if name is None:
        raise InputError(f"the run '{runs[0].name}' does not say what it was trained on; name the data: --data NAME")
    try:
        return load_data(name)
    except HoldfastError as error:
        raise InputError(f"the data of the runs cannot be loaded; name them: --data NAME. {error}") from error


def _open_model(run: Run) -> nn.Module:
    try:
        model = load_model(run.folder / files.MODEL)
    except InputError as error:
        raise InputError(
            f"the run '{run.name}' cannot be compared: only models that make_model built come back from a file alone. "
            f"{error}"
        ) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _check_models(runs: Sequence[Run], dataset: Dataset, *, given: bool) -> None:
    """Refuse, before any attack, a model that does not fit the data; `given` data may have fewer classes than it."""
    classes = len(dataset.classes)
    for run in runs:
        model = _open_model(run)
        try:
            count = check_logits(model, to_model(model, dataset.test.x[:1], dataset.test.y[:1])[0]).shape[1]
        except InputError as error:
            raise InputError(f"the run '{run.name}' does not fit the data '{dataset.name}': {error}") from error
        if count < classes or (count > classes and not given):
            raise InputError(
                f"the model of the run '{run.name}' has {count} classes, the data '{dataset.name}' have {classes}; "
                "compare runs of one task, or name data that fit all of them: --data NAME"
            )


def _check_free(folder: Path, settings: Settings, keys: Sequence[str], *, force: bool) -> None:
    """Refuse a folder with another comparison; the same one, or one with some of these runs, may grow."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out: '{folder}' is a file; give a folder")
    found = [name for name in FILES if (folder / name).exists()]
    if force or not found:
        return
    try:
        body = parse_json(read_text(folder / FILES[0]))
        before = body["settings"]
        lost = [row["name"] for row in body["rows"] if row["key"] not in keys]
        changed = [key for key in settings if before.get(key) != settings[key]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        lost, changed = [found[0]], ["it cannot be read"]
    if lost:
        why = f"other settings: {', '.join(changed)}" if changed else f"of other models: {', '.join(lost)}"
        raise InputError(
            f"out: '{folder}' already holds another comparison ({why}). "
            "Replace it: --force, or force=True; or choose another folder."
        )


def _judge(
    run: Run,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    attacks: Mapping[str, dict[str, Any]],
    store: Path | None,
    bars: Progress,
) -> Broken:
    """Attacks the model of a run where no result is stored yet; every batch is stored as it comes."""
    broken = _stored(store, attacks, len(x))
    if all(len(names) == len(x) for names in broken.values()):
        return broken
    model = _open_model(run)
    for method, options in attacks.items():
        done = broken[method]
        bar = bars.add_task(f"{run.name}: {method}", total=len(x), completed=len(done))
        for start in range(len(done), len(x), _BATCH):
            index = torch.arange(start, min(start + _BATCH, len(x)))
            inputs, labels = to_model(model, x[index], y[index])
            # Random numbers belong to the position of an input, so going on gives what one go would have.
            result = run_attack(model, inputs, labels, threat, method, seed=_SEED, index=index, **options)
            done += result.by
            if store is not None:
                files.write_json(store, {"run": run.name, "model": run.model, "threat": str(threat), "by": broken})
            bars.advance(bar, len(index))
    return broken


def _stored(store: Path | None, attacks: Mapping[str, object], inputs: int) -> Broken:
    """What broke each of the first inputs, as far as it is known."""
    if store is None or not store.exists():
        return {method: [] for method in attacks}
    try:
        by = parse_json(read_text(store))["by"]
        broken = {method: [str(name) for name in by[method]] for method in attacks}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _stale(store, f"{type(error).__name__}: {error}") from error
    if any(len(names) > inputs for names in broken.values()):
        raise _stale(store, f"it has results of more than {inputs} inputs")
    return broken


def _stale(store: Path, reason: str) -> StorageError:
    return StorageError(f"cannot use the stored results '{store}': {reason}. Delete the file to judge the run again.")


def _row(run: Run, key: str, broken: Broken) -> Row:
    scores = {"clean": [name != "clean" for name in broken["pgd"]]}
    scores |= {method: [not name for name in names] for method, names in broken.items()}
    seconds = sum(epoch["seconds"] for epoch in run.history)
    images = [epoch["images_per_second"] * epoch["seconds"] for epoch in run.history if "images_per_second" in epoch]
    robust = [epoch["validation_robust"] for epoch in run.history if "validation_robust" in epoch]
    return Row(
        name=run.name,
        folder=str(run.folder),
        method=method_text(run.recipe),
        scores={name: Score(sum(right), len(right)) for name, right in scores.items()},
        seconds=seconds,
        images_per_second=sum(images) / seconds if len(images) == len(run.history) and seconds > 0 else None,
        peak_memory_mb=max(
            (epoch["peak_memory_mb"] for epoch in run.history if "peak_memory_mb" in epoch), default=None
        ),
        best_epoch=_best_epoch(run),
        epochs=int(run.history[-1]["epoch"]),
        robust_gap=max(robust) - robust[-1] if robust else None,
        key=key,
    )


def _best_epoch(run: Run) -> int:
    """The epoch that training kept: the later one of equals by the score that selects, else the last one."""
    try:
        select = load_recipe(run.folder).selects
    except HoldfastError:  # a recipe of another version
        select = _part(run.recipe, "evaluate").get("select", "auto")
    if select not in ("robust", "clean"):
        select = "robust" if "validation_robust" in run.history[-1] else "clean"
    score = f"validation_{select}"
    average = _part(run.recipe, "average")
    # An average is judged from its first epoch on; snapshots of several periods are kept together, up to the last.
    first = average.get("start_epoch", 0) if average.get("name", "none") != "none" else 0
    judged = [(epoch[score], epoch["epoch"]) for epoch in run.history if score in epoch and epoch["epoch"] > first]
    return int(max(judged)[1] if judged and not run.recipe.get("periods") else run.history[-1]["epoch"])


def _part(recipe: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = recipe.get(key)
    return part if isinstance(part, Mapping) else {}


def method_text(recipe: Mapping[str, Any]) -> str:
    """What trained the model: the parts of a recipe that make the method; others, and unknown ones, are passed over.

    >>> method_text({"objective": {"name": "at", "steps": 5}, "regularizers": {"trh": {"weight": 0.1}}, "epochs": 3})
    'at (5 steps) + trh'
    """
    parts = ("objective", "attack", "targets", "regularizers", "perturb_weights", "average")
    return " + ".join(text for part in parts for text in _names(recipe.get(part))) or "unknown"


def _names(part: object) -> list[str]:
    """The methods that a part of a recipe names: itself a name, a table with a name, or several of them."""
    if isinstance(part, str):
        return [] if part in ("", "none") else [part]
    if isinstance(part, list):
        return [text for each in part for text in _names(each)]
    if not isinstance(part, Mapping):
        return []
    if "name" not in part:
        return [str(key) for key in part]
    steps = f" ({part['steps']} steps)" if "steps" in part else ""
    return [text + steps for text in _names(part["name"])]


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
