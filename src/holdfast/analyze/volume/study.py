"""Optimisers side by side: test accuracy at equal normalised training loss, over many small training sets."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.analyze.volume.family import make_family
from holdfast.analyze.volume.few_samples import FewSamples, few_samples
from holdfast.analyze.volume.fitting import Bins, Fitting, Found, make_fitting
from holdfast.analyze.volume.gradient_descent import gradient_descent
from holdfast.analyze.volume.guess_and_check import guess_and_check, unreached, volumes
from holdfast.analyze.volume.pattern_search import pattern_search
from holdfast.analyze.volume.random_greedy import random_greedy
from holdfast.analyze.volume.wedge import accuracy_of
from holdfast.data import Dataset
from holdfast.errors import InputError, did_you_mean
from holdfast.models import make_model
from holdfast.models.own import build_own
from holdfast.utils.clock import over
from holdfast.utils.files import write_json
from holdfast.utils.hashes import hash_tensors, structure_of
from holdfast.utils.options import Count
from holdfast.utils.progress import progress_bars, without_progress
from holdfast.utils.resume import as_stored, check_folder, check_same, reading

Row = dict[str, Any]
Make = Callable[[float | None], nn.Module]
"""From a width, or none, to an architecture in eval mode."""
FILE = "volume.json"


@dataclass(frozen=True)
class Optimiser:
    """A row of the comparison.

    Attributes:
        run: from a fitting, bins, a seed and the guesses allowed to what was found.
        linear: it fits a linear model in place of the family; its loss is normalised with divisor 1.
    """

    run: Callable[[Fitting, Bins, int, int], Found]
    linear: bool = False


OPTIMISERS: dict[str, Optimiser] = {
    "guess-and-check": Optimiser(
        lambda fitting, bins, seed, limit: guess_and_check(fitting, bins, seed=seed, limit=limit)
    ),
    "pattern-search": Optimiser(
        lambda fitting, bins, seed, limit: pattern_search(fitting, bins, seed=seed, limit=limit)
    ),
    "random-greedy": Optimiser(lambda fitting, bins, seed, limit: random_greedy(fitting, bins, seed=seed, limit=limit)),
    "sgd": Optimiser(lambda fitting, bins, seed, limit: gradient_descent(fitting, bins, seed=seed)),
    "linear": Optimiser(
        lambda fitting, bins, seed, limit: gradient_descent(
            fitting, bins, lr=0.1, epochs=20, runs=256, start="default", seed=seed
        ),
        linear=True,
    ),
}


def study(
    data: Dataset,
    make: Make,
    bins: Bins,
    *,
    widths: Sequence[float | None] = (0.5,),
    samples: Sequence[int] = (2, 4, 8),
    splits: Count = 20,
    optimisers: Sequence[str] = ("guess-and-check", "sgd", "linear"),
    divisor: float | None = 3.0,
    limit: Count = 200_000,
    seed: int = 0,
    out: Path | None = None,
) -> list[Row]:
    """Run each optimiser on each training set; a row for each bin.

    A split is a random pair of classes and a random training set of them; accuracy is measured on all test samples of
    the pair. With `out`, finished cells are kept in that folder, and the same call goes on after an interruption. When
    the deadline is over it ends: the rows of a cell that was cut short are returned and not kept.

    Args:
        data: images or points with two classes or more.
        make: architecture of a width, two classes; see `architecture_of`.
        bins: of the normalised training loss.
        limit: guesses, or steps, that an optimiser may make in one cell.
        divisor: see `loss_scale`.
    """
    unknown = [name for name in optimisers if name not in OPTIMISERS]
    if unknown:
        raise InputError(f"unknown optimiser '{unknown[0]}'. " + did_you_mean(unknown[0], OPTIMISERS))
    modules = [make(width) for width in widths]
    settings = {
        "data": data.name,
        "architecture": hash_tensors({str(i): structure_of(module) for i, module in enumerate(modules)})[:12],
        "parameters": [make_family(module).size for module in modules],
        "bins": list(bins),
        "divisor": divisor,
        "limit": limit,
        "seed": seed,
    }
    cells = _stored(out, settings)
    order = [
        (width, count, split, name)
        for split in range(splits)
        for count in samples
        for width in widths
        for name in optimisers
    ]
    with progress_bars() as bars:
        bar = bars.add_task("volume study", total=len(order))
        for width, count, split, name in order:
            key = f"{width} {count} {split} {name}"
            if key not in cells and not over():
                task = few_samples(data, count, seed=seed + 1_000 * split + count)
                with without_progress():
                    cells[key] = _cell(task, make(width), bins, name, divisor, limit, seed + split)
                if not over():
                    _store(out, settings, cells)
            fits = [row["fits"] for rows in cells.values() for row in rows[:1] if row["optimiser"] == "guess-and-check"]
            text = "volume study" + (f", {sum(fits) / len(fits):.1e} of the guesses fit" if fits else "")
            bars.update(bar, description=text, advance=1)
    found = []
    for width, count, split, name in order:
        known = {"width": width, "samples": count, "split": split}
        found += [{**known, **row} for row in cells.get(f"{width} {count} {split} {name}", [])]
    return found


def summary(rows: Sequence[Row]) -> list[Row]:
    """Mean test accuracy over the splits, its standard error and the splits that count, for each cell of the table."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = (row["width"], row["samples"], row["optimiser"], row["low"], row["high"])
        groups.setdefault(key, [])
        if row["accuracy"] is not None:
            groups[key].append(row["accuracy"])
    names = ("width", "samples", "optimiser", "low", "high")
    found = []
    for key, values in groups.items():
        numbers = torch.tensor(values, dtype=torch.float64)
        mean = float(numbers.mean()) if values else None
        error = float(numbers.std()) / math.sqrt(len(values)) if len(values) > 1 else None
        found.append({**dict(zip(names, key, strict=True)), "accuracy": mean, "error": error, "splits": len(values)})
    return found


def architecture_of(name: str, data: Dataset, options: Mapping[str, Any] | None = None, *, classes: int = 2) -> Make:
    """The architecture of that name as a function of its option `width`; None leaves it as it is.

    Args:
        name: in the catalogue, or FILE.py:NAME, a class or function of the user's own that makes the module.
        data: decides the shape of the inputs, which the catalogue needs.
        options: other arguments of the architecture.
        classes: that the catalogue's networks tell apart.
    """
    shape = tuple(data.train.x.shape[1:])

    def make(width: float | None) -> nn.Module:
        given = {**(options or {}), **({} if width is None else {"width": width})}
        if ".py:" in name:
            return build_own(name, given).eval()
        return make_model(name, input_shape=shape, classes=classes, **given).eval()

    return make


def _cell(
    task: FewSamples, module: nn.Module, bins: Bins, name: str, divisor: float | None, limit: int, seed: int
) -> list[Row]:
    optimiser, x = OPTIMISERS[name], task.train.x
    if optimiser.linear:
        module = make_model("linear", input_shape=tuple(x.shape[1:]), classes=len(task.classes)).eval()
        divisor = 1.0
    fitting = make_fitting(module, x, task.train.y, divisor=divisor)
    found = optimiser.run(fitting, bins, seed, limit)
    right = accuracy_of(fitting.family.logits(found.weights, task.test.x, chunk=1), task.test.y).tolist()
    by_bin = dict(zip(found.bin.tolist(), zip(right, found.loss.tolist(), strict=True), strict=True))
    guessed = name == "guess-and-check" and found.tried > 0  # none where the deadline came first
    shares = volumes(found) if guessed else [None] * len(bins)
    fits = {"fits": found.accepted / max(found.tried, 1), "tried": found.tried, "seconds": found.seconds}
    rows = []
    for i, (low, high) in enumerate(bins):
        accuracy, loss = by_bin.get(i, (None, None))
        row: Row = {"optimiser": name, "low": low, "high": high, "accuracy": accuracy, "loss": loss, **fits}
        share = shares[i]
        if share is not None:
            row |= {"volume": share.share, "volume_low": share.low, "volume_high": share.high}
        rows.append(row)
    if guessed:
        rows[0]["missing"] = unreached(found, bins)
    return rows


def _stored(out: Path | None, settings: Mapping[str, Any]) -> dict[str, list[Row]]:
    if out is None:
        return {}
    check_folder(out)
    path = out / FILE
    if not path.exists():
        return {}
    with reading(path, "delete it to start anew"):
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored["settings"].setdefault("architecture", settings["architecture"])  # older folders do not name it
        check_same(stored["settings"], settings, f"'{out}'")
        cells: dict[str, list[Row]] = stored["cells"]
    return cells


def _store(out: Path | None, settings: Mapping[str, Any], cells: Mapping[str, list[Row]]) -> None:
    if out is not None:
        write_json(out / FILE, {"settings": as_stored(settings), "cells": dict(cells)})
