"""Progress bars on the error output, only if it is a terminal."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def progress_bars(show: bool = True, *extra: ProgressColumn) -> Progress:
    """Make a bar with text, count, `extra` columns and the remaining time, for use in a `with` statement."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *extra, TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not (show and console.is_terminal))
