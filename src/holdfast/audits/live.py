"""What a run has come to while it is going: `progress.json`, for whoever looks at the folder from outside.

The store itself is locked by the run.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from holdfast.audits.saved import PROGRESS
from holdfast.utils.files import write_text

_EVERY = 1.0  # seconds


class Live:
    """Write the state of a run into its folder, at most once a second; do nothing without a folder.

    Args:
        folder: folder of the run, or None.
        about: what does not change: name, data, created.
    """

    def __init__(self, folder: Path | None, about: Mapping[str, Any]) -> None:
        self._path = None if folder is None else folder / PROGRESS
        self._about = about
        self._last = -_EVERY

    def show(self, **values: Any) -> None:
        """The run goes on: step, done, total, seconds, brackets."""
        if self._path is not None and time.monotonic() - self._last >= _EVERY:
            self._write("running", values)
            self._last = time.monotonic()

    def end(self, state: Literal["finished", "failed"], **values: Any) -> None:
        """The run has ended."""
        self._write(state, values)

    def _write(self, state: str, values: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        nothing = {"step": "", "done": 0, "total": 0, "seconds": 0.0, "error": None, "brackets": []}
        body = {"state": state, **self._about, "updated": now, **nothing, **values}
        with suppress(OSError):  # a full disk stops the run where results are stored, not where they are shown
            write_text(self._path, json.dumps(body, sort_keys=True))
