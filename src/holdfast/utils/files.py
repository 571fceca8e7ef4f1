"""Files that appear whole or not at all: written beside their place, then renamed into it."""

import contextlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

from holdfast.errors import StorageError


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, in a folder that is made when missing; a failure leaves what was there as it was."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}. What was there is untouched; check permissions and free "
            "space, or choose another folder."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with sorted keys, so that the same value gives the same bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")
