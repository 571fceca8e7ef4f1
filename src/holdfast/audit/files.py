"""Saves an audit in a folder and reads it back. Files appear whole or not at all."""

import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from holdfast.attacks.trust import Indicator
from holdfast.audit.result import FIELDS, JSON_VERSION, Audit, Record
from holdfast.audit.store import Example
from holdfast.errors import StorageError

REPORT, RESULT, EXAMPLES = "report.html", "audit.json", "examples.npz"


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Lets `write` fill a file beside `path`, then puts it in its place: a reader never sees half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a report is to be shared as the user's umask says.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def save_arrays(path: Path, **arrays: Any) -> None:
    """Writes a compressed .npz, in a folder that is made when missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: np.savez_compressed(file, **arrays))


def save_audit(audit: Audit, folder: Path) -> Path:
    """Writes `audit.json`, `examples.npz` and `report.html` into `folder`; returns the path of the report."""
    report, result = audit.to_html().encode(), audit.to_json().encode()
    arrays = {}
    for example in audit.examples:
        arrays[f"x_{example.position}"], arrays[f"adv_{example.position}"] = example.x, example.x_adv
        if example.attribution is not None:
            arrays[f"why_{example.position}"] = example.attribution
    try:
        save_arrays(folder / EXAMPLES, **arrays)
        write_whole(folder / RESULT, lambda file: file.write(result))
        write_whole(folder / REPORT, lambda file: file.write(report))
    except OSError as error:
        raise StorageError(
            f"cannot save the audit in '{folder}': {error}; check the path, permissions and free space"
        ) from error
    return folder / REPORT


def load_audit(folder: str | Path) -> Audit:
    """Reads an audit back from the folder that `Audit.save` or `audit(out=...)` wrote."""
    path = Path(folder) / RESULT
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StorageError(f"there is no finished audit in '{folder}': '{path}' is missing") from error
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read '{path}': {error}; run the audit again with the same folder") from error
    if not isinstance(body, dict) or body.get("schema_version") != JSON_VERSION:
        version = body.get("schema_version") if isinstance(body, dict) else None
        raise StorageError(f"'{path}' has schema version {version}, this Holdfast reads {JSON_VERSION}")
    try:
        values: dict[str, Any] = {key: tuple(body[key]) if isinstance(body[key], list) else body[key] for key in FIELDS}
        records = tuple(Record(**record) for record in body["records"])
        # An audit from before there were indicators has none.
        trust = tuple(Indicator(**indicator) for indicator in body.get("trust", ()))
    except (KeyError, TypeError) as error:
        raise StorageError(f"'{path}' is not a complete audit: {error}; run the audit again") from error
    return Audit(**values, records=records, trust=trust, examples=_load_examples(Path(folder) / EXAMPLES))


def _load_examples(path: Path) -> tuple[Example, ...]:
    """The pictures; a folder without them still gives a report."""
    if not path.exists():
        return ()
    try:
        with np.load(path, allow_pickle=False) as arrays:
            positions = [int(key[2:]) for key in arrays.files if key.startswith("x_")]
            why = {p: arrays[f"why_{p}"] for p in positions if f"why_{p}" in arrays.files}
            return tuple(Example(p, arrays[f"x_{p}"], arrays[f"adv_{p}"], why.get(p)) for p in positions)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise StorageError(f"cannot read '{path}': {error}; delete it to go without pictures") from error
