"""What the user sees while a run goes: two bars on a terminal, TensorBoard if the recipe asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from holdfast.errors import InputError
from holdfast.utils.progress import progress_bars


class Display:
    """The epochs of the run and the batches of the epoch, each with the last figures."""

    def __init__(self, bars: Progress, epochs: int, batches: int) -> None:
        self._bars, self._batches = bars, batches
        self._epoch = bars.add_task("epoch", total=epochs, figures="")
        self._batch = bars.add_task("batch", total=batches, figures="")

    def show_step(self, batch: int, loss: float) -> None:
        self._bars.update(self._batch, completed=batch, figures=f"loss {loss:.4f}")

    def show_epoch(self, epoch: int, row: dict[str, Any]) -> None:
        """After each epoch, or when a run is resumed."""
        scores = [f"{key.removeprefix('validation_')} {value:.1%}" for key, value in row.items() if "validation" in key]
        self._bars.update(self._epoch, completed=epoch, figures="  ".join(scores))
        self._bars.update(self._batch, completed=0)


@contextmanager
def display(shown: bool, *, epochs: int, batches: int) -> Iterator[Display]:
    """Bars on the terminal; nothing where standard error is not one or `shown` is false."""
    figures = TextColumn("{task.fields[figures]}")
    with progress_bars(shown and Console(stderr=True).is_terminal, TimeElapsedColumn(), figures) as bars:
        yield Display(bars, epochs, batches)


def write_scalars(folder: Path, row: dict[str, Any]) -> None:
    """The figures of one epoch for TensorBoard, as an event file of its own, so that a resumed run only adds some."""
    writer = _summary_writer()(str(folder))
    for key, value in row.items():
        if key != "epoch":
            writer.add_scalar(key, value, row["epoch"])
    writer.close()


def check_tensorboard(folder: Path | None) -> None:
    """Refuse `tensorboard = true` early where it cannot work."""
    if folder is None:
        raise InputError("tensorboard: needs a folder to write to; give out=")
    _summary_writer()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("tensorboard: not installed; pip install 'holdfast[tensorboard]'") from error
    return SummaryWriter
