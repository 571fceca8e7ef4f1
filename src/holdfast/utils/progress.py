"""Progress on the error output: bars on a terminal and in a notebook, one line every ten seconds elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

EVERY = 10.0
"""Seconds between two lines where there is no terminal, as in a pipe or a log file."""
FRAME = 0.2
"""Seconds between two pictures of a bar in a notebook."""


_SILENT: ContextVar[bool] = ContextVar("silent", default=False)


class Searched(NamedTuple):
    """How far a search by splitting has come: parts bounded so far, the worst bound of an open part, parts left."""

    splits: int
    worst: float
    left: int

    def __str__(self) -> str:
        return f"{self.splits:,} splits, worst bound {self.worst:.3g}, {self.left:,} parts left"


_LISTENER: ContextVar[Callable[[Searched], None] | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Callable[[Searched], None]) -> Iterator[None]:
    """Let searches inside tell the listener how far they have come.

    >>> with heard_by(lambda state: print(state)):
    ...     tell(lambda: Searched(12, -0.25, 3))
    12 splits, worst bound -0.25, 3 parts left
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(state: Callable[[], Searched]) -> None:
    """Tell the listener, if there is one; the state is worked out only then."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(state())


def told(bars: Progress, bar: TaskID, text: str) -> Callable[[Searched], None]:
    """A listener that shows searches behind the text of a bar."""
    return lambda state: bars.update(bar, description=f"{text}, {state}")


@contextmanager
def without_progress(silent: bool = True) -> Iterator[None]:
    """Show no progress inside."""
    token = _SILENT.set(silent)
    try:
        yield
    finally:
        _SILENT.reset(token)


def shows_progress(show: bool = True) -> bool:
    """Whether to show progress: not inside `without_progress`."""
    return show and not _SILENT.get()


def progress_bars(show: bool = True, *extra: ProgressColumn) -> Progress:
    """Text, bar, count, `extra` columns and the time that is left; to be used in a `with` statement.

    Args:
        show: False for silence.
        extra: columns between the count and the time.
    """
    show, console = shows_progress(show), Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *extra, TimeRemainingColumn())
    if not show:
        return Progress(disable=True)
    if console.is_jupyter:
        return _Cell(*columns, console=console, disable=True)
    if console.is_terminal:
        return Progress(*columns, console=console)
    return _Lines(*columns, console=console, disable=True)


class _Plain(Progress):
    """The same calls, shown by `_say` in place of a live display."""

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
        raise NotImplementedError


class _Lines(_Plain):
    """A line every ten seconds: what is done, of how much, and how long it still takes."""

    def _say(self, task_id: TaskID) -> None:
        now, task = time.monotonic(), self._tasks[task_id]
        if now - self._last < EVERY or not task.total:
            return
        self._last = now
        print(_text(task, now - self._began), file=self.console.file, flush=True)


class _Cell(_Plain):
    """A bar for each task below the cell of a notebook; needs no widgets, and goes away at the end."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._shown: Any = None

    def stop(self) -> None:
        super().stop()
        if self._shown is not None:
            self._shown.update(_html(""))

    def _say(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if self._shown is not None and now - self._last < FRAME:
            return
        self._last = now
        page = _html("<br>".join(_bar(task, now - self._began) for task in self.tasks))
        if self._shown is None:
            from IPython.display import display

            self._shown = display(page, display_id=True)
        else:
            self._shown.update(page)


def _text(task: Task, seconds: float) -> str:
    """Name the task, what is done and how long the rest will take."""
    total = task.total or 0
    share = task.completed / total if total else 0.0
    left = f", about {seconds * (1 - share) / share:.0f} s left" if 0 < share < 1 else ""
    return f"{task.description}: {task.completed:.0f} of {total:.0f} ({share:.0%}){left}"


def _bar(task: Task, seconds: float) -> str:
    bar = f'<progress value="{task.completed:.0f}" max="{task.total or 1:.0f}"></progress>'
    return f"{bar} {escape(_text(task, seconds))}"


def _html(text: str) -> Any:
    from IPython.display import HTML

    return HTML(text)
