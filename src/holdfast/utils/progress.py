"""Progress on the error output: bars on a terminal and in a notebook, one line every ten seconds elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

EVERY = 10.0
"""Seconds between two lines where there is no terminal, as in a pipe or a log file."""


def progress_bars(show: bool = True, *extra: ProgressColumn) -> Progress:
    """Text, bar, count, `extra` columns and the time that is left; to be used in a `with` statement.

    Args:
        show: False for silence.
        extra: columns between the count and the time.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *extra, TimeRemainingColumn())
    if console.is_terminal or console.is_jupyter:
        return Progress(*columns, console=console, disable=not show)
    return _Lines(*columns, console=console, disable=True) if show else Progress(disable=True)


class _Lines(Progress):
    """The same calls, shown as lines: what is done, of how much, and how long it still takes."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._began = self._last = time.monotonic()

    def update(self, task_id: TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        now, task = time.monotonic(), self._tasks[task_id]
        if now - self._last < EVERY or not task.total:
            return
        self._last = now
        share = task.completed / task.total
        left = f", about {(now - self._began) * (1 - share) / share:.0f} s left" if 0 < share < 1 else ""
        text = f"{task.description}: {task.completed:.0f} of {task.total:.0f} ({share:.0%}){left}"
        print(text, file=self.console.file, flush=True)
