"""Finished training runs, read from their folders: recipe, history and the hash of the model."""

import csv
import hashlib
import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError, InputError, StorageError
from holdfast.training import folder as files
from holdfast.training.recipe.reading import load_recipe
from holdfast.utils.limits import parse_json, read_text, without_recursion

_NEEDED = ("epoch", "seconds")
_READ = (*_NEEDED, "images_per_second", "peak_memory_mb", "validation_clean", "validation_robust")


@dataclass(frozen=True)
class Run:
    """A finished run as its folder tells it; `model` is the sha256 of the model file."""

    folder: Path
    name: str
    recipe: Mapping[str, Any]
    data: str | None
    history: tuple[Mapping[str, float], ...]
    model: str


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


def best_epoch(run: Run) -> int:
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
