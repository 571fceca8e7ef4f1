"""Progress bars, on the error output and only if that is a terminal."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def progress_bars(show: bool = True, *extra: ProgressColumn) -> Progress:
    """Text, bar, count, `extra` columns and the time that is left; to be used in a `with` statement."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *extra, TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not (show and console.is_terminal))
