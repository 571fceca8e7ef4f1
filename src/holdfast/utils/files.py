"""The one atomic write: a file appears whole or not at all."""

import contextlib
import csv
import io
import json
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from holdfast.errors import StorageError

WAY_OUT = "make room or choose another folder (out=)"


def write_whole(path: Path, write: Callable[[IO[bytes]], object], *, way_out: str = WAY_OUT) -> None:
    """Let `write` fill a file beside `path`, then put it in its place: a failure leaves the old file as it was.

    Missing folders are made. The mode of the file follows the umask of the user.

    Args:
        path: the file.
        write: gets the open file.
        way_out: what the user can do where this fails; the end of the error.

    Raises:
        StorageError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if not isinstance(error, OSError | RuntimeError):  # torch reports a full disk as a RuntimeError
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise StorageError(f"cannot write {path}: {reason}. What was there is untouched; {way_out}.") from error


def write_bytes(path: Path, content: bytes, *, way_out: str = WAY_OUT) -> None:
    """Write a file of bytes, whole."""
    write_whole(path, lambda file: file.write(content), way_out=way_out)


def write_text(path: Path, text: str, *, way_out: str = WAY_OUT) -> None:
    """Write a text file in UTF-8, whole."""
    write_bytes(path, text.encode(), way_out=way_out)


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV, the header first; None is an empty cell."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: Iterable[Iterable[Any]], *, way_out: str = WAY_OUT) -> None:
    """Write rows as a CSV file, whole."""
    write_text(path, csv_text(rows), way_out=way_out)


def write_json(path: Path, content: Any, *, way_out: str = WAY_OUT) -> None:
    """Write indented JSON, whole; keys are sorted, so that the same content gives the same bytes."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False)
    write_text(path, text + "\n", way_out=way_out)


def remove_leftovers(*paths: Path) -> None:
    """Remove what a killed process left of these files half written; no other process may be writing them.

    The last part of a path may be a pattern, such as `examples-*.npz`.
    """
    for path in paths:
        for part in path.parent.glob(f".{path.name}.????????"):
            part.unlink(missing_ok=True)
