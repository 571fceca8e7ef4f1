"""The folder of an attack run: results appear batch by batch, every file whole or not at all.

attack.json     what decides the results; a run with other settings cannot go on in the folder
parts/          one .npz for each finished batch: all that resuming needs
results.csv     one row for each input
examples.npz    x, x_adv, y, success, by, index: plain arrays, as the attack had them
summary.json    accuracies, costs, settings, versions, hashes
png/            the examples as pictures, if asked for
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.errors import InputError
from holdfast.utils.files import write_csv, write_json
from holdfast.utils.limits import parse_json, read_text
from holdfast.utils.resume import GO_ON, as_stored, check_folder, check_same, load_arrays, reading, save_arrays

RUN, PARTS, RESULTS, SUMMARY, PNG = "attack.json", "parts", "results.csv", "summary.json", "png"
EXAMPLES = "examples.npz"


@dataclass(frozen=True, eq=False)
class Found:
    """What the attack found for some inputs; arrays with one entry each."""

    index: npt.NDArray[np.int64]  # place of the input among those of the run; in results, its position in the data
    x_adv: npt.NDArray[np.floating]  # the strongest point found, shape (B, ...)
    success: npt.NDArray[np.bool_]  # True where the model misclassifies `x_adv`
    by: npt.NDArray[np.str_]  # the attack; "clean" where the input is misclassified unchanged, "" where it held
    prediction: npt.NDArray[np.int64]  # class that the model gives to `x_adv`
    distance: npt.NDArray[np.floating]  # of `x_adv`, in the unit of the threat or norm; infinity where not `success`
    gradients: npt.NDArray[np.int64]  # gradient evaluations
    queries: npt.NDArray[np.int64]  # forward passes, gradient evaluations included
    seconds: npt.NDArray[np.float64]  # time spent: the time of the batch in equal shares


def open_folder(folder: Path, fingerprint: dict[str, Any], *, resume: bool) -> list[Found]:
    """Make the folder ready for a run and return the batches that are stored there.

    A folder that holds results is refused unless `resume`; one in which a run stored nothing counts as empty.
    """
    check_folder(folder)
    paths = sorted((folder / PARTS).glob("*.npz"))
    results = [name for name in (SUMMARY, RESULTS, EXAMPLES) if (folder / name).exists()]
    if (paths or results) and not resume:
        raise InputError(
            f"out: '{folder}' already holds a run ({PARTS if paths else results[0]}). "
            "Go on with it: --resume, or resume=True; or choose another folder."
        )
    if resume:
        check_same(_stored_settings(folder / RUN), fingerprint, f"'{folder}'")
    else:
        write_json(folder / RUN, as_stored(fingerprint), way_out=GO_ON)
    return [_load_part(path) for path in paths]


def began_with_the_first(folder: Path) -> bool:
    """Whether version 0.1.0 began the run of the folder, which took the first n inputs; False if there is none."""
    return (folder / RUN).is_file() and "drawn" not in _stored_settings(folder / RUN)


def _stored_settings(path: Path) -> dict[str, Any]:
    try:
        with reading(path, "choose another folder to start again"):
            return dict(parse_json(read_text(path)))
    except FileNotFoundError as error:
        raise InputError(f"there is no run to resume in '{path.parent}': '{path.name}' is missing") from error


def save_part(folder: Path, found: Found) -> None:
    """Store one batch: all of it or, when the process dies or the disk is full, nothing of it."""
    path = folder / PARTS / f"{found.index[0]:08d}.npz"
    save_arrays(path, {field.name: getattr(found, field.name) for field in fields(Found)})


def _load_part(path: Path) -> Found:
    with reading(path, "delete it to attack its inputs again"):
        arrays = load_arrays(path)
        return Found(**{field.name: arrays[field.name] for field in fields(Found)})


def join(parts: list[Found]) -> Found:
    """All batches as one, in the order of the data."""
    whole = {field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Found)}
    order = np.argsort(whole["index"], kind="stable")
    return Found(**{name: values[order] for name, values in whole.items()})


def save_results(
    folder: Path, x: npt.NDArray[np.floating], y: npt.NDArray[np.int64], found: Found, summary: Mapping[str, Any]
) -> None:
    """Write `results.csv`, `examples.npz` and `summary.json`; the summary last, so that it marks a finished run."""
    columns = ("success", "by", "prediction", "distance", "gradients", "queries")
    values = zip(found.index.tolist(), y.tolist(), *(getattr(found, c).tolist() for c in columns), strict=True)
    rows = (["" if value == np.inf else value for value in row] for row in values)
    write_csv(folder / RESULTS, [("index", "label", *columns), *rows], way_out=GO_ON)
    examples = {"x": x, "x_adv": found.x_adv, "y": y, "success": found.success, "by": found.by, "index": found.index}
    save_arrays(folder / EXAMPLES, examples)
    write_json(folder / SUMMARY, as_stored(summary), way_out=GO_ON)
