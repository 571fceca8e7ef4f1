"""Rows of a run that is under way, kept in one file beside its output: a killed run goes on where it stopped."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import InputError
from holdfast.utils.files import write_text
from holdfast.utils.limits import parse_json, read_text
from holdfast.utils.resume import as_stored, check_same, reading

Row = dict[str, object]
_WAY_OUT = "delete it to start again"


class Journal:
    """The rows so far, by input; nothing is kept without a path.

    Args:
        path: the file, or None.
        settings: what decides the rows, as JSON values; a file of other settings is refused.
        resume: go on with the file; otherwise one that is there is refused, so that no work is lost by a slip.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.path, self.settings = path, settings
        self.rows: dict[int, Row] = {}
        if path is None or not path.exists():
            return
        if not resume:
            raise InputError(f"'{path}' holds the rows of an earlier run: --resume goes on with them; or delete it")
        with reading(path, _WAY_OUT):
            body = parse_json(read_text(path), finite=False)
            check_same(body["settings"], settings, f"'{path}'")
            self.rows = {int(row["input"]): dict(row) for row in body["rows"]}

    def add(self, rows: Sequence[Row]) -> None:
        """Keep further rows."""
        self.rows.update((int(str(row["input"])), row) for row in rows)
        if self.path is not None:
            body = {"settings": as_stored(self.settings), "rows": list(self.rows.values())}
            write_text(self.path, json.dumps(body))
