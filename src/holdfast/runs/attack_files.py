"""The folder of an attack run: results appear batch by batch, every file whole or not at all.

attack.json     what decides the results; a run with other settings cannot go on in the folder
parts/          one .npz for each finished batch: all that resuming needs
results.csv     one row for each input
examples.npz    x, x_adv, y, success, by, index: plain arrays, as the attack had them
summary.json    accuracies, costs, settings, versions, hashes
png/            the examples as pictures, if asked for
"""

import csv
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.audits.saved import save_arrays, write_whole
from holdfast.errors import InputError, StorageError
from holdfast.utils.limits import parse_json, read_text

RUN, PARTS, RESULTS, SUMMARY, PNG = "attack.json", "parts", "results.csv", "summary.json", "png"
EXAMPLES = "examples.npz"


@dataclass(frozen=True, eq=False)
class Found:
    """What the attack found for some inputs; arrays with one entry each.

    Attributes:
        index: (B,) int64, position of the input in the data.
        x_adv: the strongest point found, shape (B, ...).
        success: (B,) bool, True where the model misclassifies `x_adv`.
        by: (B,) text, the attack; "clean" where the input is misclassified unchanged, "" where nothing broke it.
        prediction: (B,) int64, class that the model gives to `x_adv`.
        distance: (B,) of `x_adv` from the input, in the unit of the threat or norm; infinity where not `success`.
        gradients: (B,) int64, gradient evaluations.
        queries: (B,) int64, forward passes, those of the gradients included.
        seconds: (B,) time spent, that of the batch in equal shares.
    """

    index: npt.NDArray[np.int64]
    x_adv: npt.NDArray[np.floating]
    success: npt.NDArray[np.bool_]
    by: npt.NDArray[np.str_]
    prediction: npt.NDArray[np.int64]
    distance: npt.NDArray[np.floating]
    gradients: npt.NDArray[np.int64]
    queries: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]


def open_folder(folder: Path, fingerprint: dict[str, Any], *, resume: bool) -> list[Found]:
    """Makes the folder ready for a run and returns the batches that are stored there.

    A folder that holds results is refused unless `resume`; one in which a run stored nothing counts as empty.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out: '{folder}' is a file; give a folder")
    paths = sorted((folder / PARTS).glob("*.npz"))
    results = [name for name in (SUMMARY, RESULTS, EXAMPLES) if (folder / name).exists()]
    if (paths or results) and not resume:
        raise InputError(
            f"out: '{folder}' already holds a run ({PARTS if paths else results[0]}). "
            "Go on with it: --resume, or resume=True; or choose another folder."
        )
    now = json.loads(_json(fingerprint))
    if resume:
        _check_same(folder / RUN, now)
    else:
        write_text(folder / RUN, _json(now))
    return [_load_part(path) for path in paths]


def _check_same(path: Path, now: dict[str, Any]) -> None:
    try:
        stored = dict(parse_json(read_text(path)))
    except FileNotFoundError as error:
        raise InputError(f"there is no run to resume in '{path.parent}': '{path.name}' is missing") from error
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"cannot read '{path}': {error}; choose another folder to start again") from error
    different = [key for key in {**stored, **now} if stored.get(key) != now.get(key)]
    if different:
        changes = "; ".join(f"{key}: was {stored.get(key)!r}, is {now.get(key)!r}" for key in different)
        raise InputError(
            f"'{path.parent}' holds the results of another run and cannot be resumed ({changes}). "
            "Repeat the settings of that run, or choose another folder."
        )


def save_part(folder: Path, found: Found) -> None:
    """Stores one batch: all of it or, when the process dies or the disk is full, nothing of it."""
    path = folder / PARTS / f"{found.index[0]:08d}.npz"
    with _writing(path):
        save_arrays(path, **{field.name: getattr(found, field.name) for field in fields(Found)})


def _load_part(path: Path) -> Found:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return Found(**{field.name: arrays[field.name] for field in fields(Found)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise StorageError(f"cannot read '{path}': {error}; delete it to attack its inputs again") from error


def join(parts: list[Found]) -> Found:
    """All batches as one, in the order of the data."""
    whole = {field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Found)}
    order = np.argsort(whole["index"], kind="stable")
    return Found(**{name: values[order] for name, values in whole.items()})


def save_results(
    folder: Path, x: npt.NDArray[np.floating], y: npt.NDArray[np.int64], found: Found, summary: Mapping[str, Any]
) -> None:
    """Writes `results.csv`, `examples.npz` and `summary.json`; the summary last, so that it marks a finished run."""
    columns = ("success", "by", "prediction", "distance", "gradients", "queries")
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["index", "label", *columns])
    for row in zip(found.index.tolist(), y.tolist(), *(getattr(found, c).tolist() for c in columns), strict=True):
        table.writerow(["" if value == np.inf else value for value in row])
    write_text(folder / RESULTS, text.getvalue())
    examples = {"x": x, "x_adv": found.x_adv, "y": y, "success": found.success, "by": found.by, "index": found.index}
    with _writing(folder / EXAMPLES):
        save_arrays(folder / EXAMPLES, **examples)
    write_text(folder / SUMMARY, _json(summary))


def write_text(path: Path, text: str) -> None:
    """A text file, whole, in a folder that is made when missing."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """A file, whole, in a folder that is made when missing."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(content))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write '{path}': {error.strerror or error}. Finished batches are kept; make room, then resume."
        ) from error


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True, default=repr, allow_nan=False) + "\n"
