"""What all runs that can be resumed share: settings that must match, arrays in files, errors with the way out."""

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.errors import HoldfastError, InputError, StorageError
from holdfast.utils.files import write_whole

GO_ON = "check the path, permissions and free space, then go on with the same folder"
"""The way out for a run that cannot write."""
Arrays = dict[str, npt.NDArray[Any]]
_DAMAGED = (OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)


def as_stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they come back from a file: tuples are lists, and what JSON does not know is its text."""
    stored: dict[str, Any] = json.loads(json.dumps(dict(settings), default=repr))
    return stored


def check_same(stored: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Refuse to go on with the results of a run that had other settings.

    >>> check_same({"seed": 0}, {"seed": 1}, "'runs/a'")
    Traceback (most recent call last):
    holdfast.errors.InputError: 'runs/a' holds the results of another run (seed: was 0, is 1) and cannot be resumed. ...
    """
    now = as_stored(now)
    different = [key for key in {**stored, **now} if stored.get(key) != now.get(key)]
    if different:
        changes = "; ".join(f"{key}: was {stored.get(key)!r}, is {now.get(key)!r}" for key in different)
        raise InputError(
            f"{where} holds the results of another run ({changes}) and cannot be resumed. "
            "Repeat the settings of that run, or choose another folder."
        )


def check_folder(folder: Path) -> None:
    """Refuse a file in the place of the folder of a run."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out: '{folder}' is a file; give a folder")


@contextmanager
def reading(path: Path, way_out: str) -> Iterator[None]:
    """Turn all that a damaged file makes fail into one error that names it; a missing file stays FileNotFoundError."""
    try:
        yield
    except (HoldfastError, FileNotFoundError):
        raise
    except _DAMAGED as error:
        raise StorageError(f"cannot read '{path}': {type(error).__name__}: {error}; {way_out}") from error


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a compressed .npz, whole or not at all, in a folder that is made when missing."""
    write_whole(path, lambda file: np.savez_compressed(file, **arrays), way_out=GO_ON)


def load_arrays(path: Path) -> Arrays:
    """The arrays of an .npz; nothing pickled is loaded. Use it within `reading`."""
    # Opened here: NumPy leaves a damaged file open.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
