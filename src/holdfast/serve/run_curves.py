"""The curves of a training run, from the history in its folder; whatever cannot be read is left out."""

import csv
import io
import math
from dataclasses import dataclass
from functools import lru_cache

NAMES = {
    "train_accuracy": "training",
    "validation_clean": "validation, clean",
    "validation_robust": "validation, under attack",
    "validation_certified": "validation, certified",
    "train_loss": "training loss",
}
"""Columns of the history that are shown, and what they are called."""
LOSS = "training loss"
BYTES, POINTS = 2**21, 200  # of a history that is read, and of a curve that is sent


@dataclass(frozen=True)
class Curve:
    """One column: `values[i]` belongs to epoch `epochs[i]`. A loss has a scale of its own; the others are shares."""

    name: str
    loss: bool
    epochs: tuple[int, ...]
    values: tuple[float, ...]


def read_curves(content: bytes | None) -> tuple[Curve, ...]:
    """The curves of a history; none if there is none, or it is no table of numbers."""
    return () if content is None else _parsed(content)


@lru_cache(maxsize=64)
def _parsed(content: bytes) -> tuple[Curve, ...]:
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode())))
    except (UnicodeDecodeError, csv.Error):
        return ()
    found = []
    for column, name in NAMES.items():
        points = [point for row in rows if (point := _point(row, column, share=name != LOSS)) is not None]
        thinned = points[:: -(-len(points) // POINTS)] if points else []
        if points and thinned[-1] != points[-1]:
            thinned.append(points[-1])
        if thinned:
            epochs, values = zip(*thinned, strict=True)
            found.append(Curve(name, name == LOSS, epochs, values))
    return tuple(found)


def _point(row: dict[str, str], column: str, *, share: bool) -> tuple[int, float] | None:
    """Epoch and value; None where either is missing or no number, or a share is none."""
    try:
        epoch, value = int(row["epoch"]), float(row[column])
    except (KeyError, TypeError, ValueError):
        return None
    fits = math.isfinite(value) and 0 <= epoch < 2**31 and abs(value) < 1e30 and (not share or 0 <= value <= 1)
    return (epoch, value) if fits else None
