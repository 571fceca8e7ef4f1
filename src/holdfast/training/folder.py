"""The folder of a run: every file appears whole or not at all, and nothing is overwritten unasked.

recipe.toml            the recipe as resolved; `holdfast train FOLDER` repeats the run
run.json               versions, seed, device, data
history.csv            one row per epoch
checkpoints/last.pt    all that resuming needs
checkpoints/best.pt    the weights of the best epoch so far
model.safetensors      the finished model
log/                   updates and losses of the examples, if asked for
tensorboard/           if asked for
"""

import csv
import io
import shutil
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import InputError, StorageError, argument
from holdfast.utils.files import remove_leftovers, write_csv, write_whole
from holdfast.utils.limits import load_tensors, read_text
from holdfast.utils.resume import reading

RECIPE, RUN, HISTORY, MODEL = "recipe.toml", "run.json", "history.csv", "model.safetensors"
LAST, BEST = Path("checkpoints") / "last.pt", Path("checkpoints") / "best.pt"
TENSORBOARD, LOG = "tensorboard", "log"
_OURS = (RECIPE, RUN, HISTORY, MODEL, "checkpoints", TENSORBOARD, LOG)


def write_tensors(path: Path, content: dict[str, Any]) -> None:
    """Write tensors and plain containers, whole; `read_tensors` reads them back without running any code."""
    write_whole(path, lambda file: torch.save(content, file))


def read_tensors(path: Path) -> dict[str, Any]:
    """Read what `write_tensors` wrote, on the CPU."""
    try:
        content = load_tensors(path)
    except FileNotFoundError as error:
        raise StorageError(
            f"there is no checkpoint {path}; start the run without {argument('resume', True)}"
        ) from error
    except Exception as error:  # the reader of a damaged archive fails in many ways, all of them mean the same
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        raise damaged(path, reason) from error
    if not isinstance(content, dict):
        raise StorageError(
            f"the checkpoint {path} is not one of Holdfast's; start the run again with {argument('force', True)}"
        )
    return content


def read_losses(folder: Path) -> torch.Tensor:
    """The loss of each training input, averaged over the epochs of the run, (N,)."""
    kept = read_tensors(folder / LAST).get("objective")
    sums, counts = (kept.get(key) if isinstance(kept, dict) else None for key in ("loss_sum", "loss_count"))
    if not isinstance(sums, torch.Tensor) or not isinstance(counts, torch.Tensor):
        raise InputError(f"the run in '{folder}' recorded no loss for each input; its objective does not do that")
    if bool((counts == 0).any()):
        raise InputError(f"the run in '{folder}' has not seen {int((counts == 0).sum())} of its inputs yet")
    return sums.double() / counts.double()


def damaged(path: Path, reason: str) -> StorageError:
    """The error for a checkpoint that cannot be used."""
    return StorageError(
        f"the checkpoint {path} is damaged ({reason}). Restore it from a copy, or start the run again with "
        f"{argument('force', True)}."
    )


def write_history(folder: Path, history: list[dict[str, Any]]) -> None:
    """Write all rows so far; a column that some rows lack stays empty there."""
    if history:
        columns = list(dict.fromkeys(key for row in history for key in row))
        write_csv(folder / HISTORY, [columns, *([row.get(key, "") for key in columns] for row in history)])


def read_history(folder: Path) -> list[dict[str, str]]:
    """The rows of the history as they are written, by column."""
    path = folder / HISTORY
    with reading(path, "repeat the run"):
        return list(csv.DictReader(io.StringIO(read_text(path))))


def check_free(folder: Path, *, resume: bool, force: bool) -> None:
    """Refuse a folder that holds a run, unless it is to be resumed or replaced."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out: {folder} is a file; give a folder")
    found = [name for name in _OURS if (folder / name).exists()]
    if found and not (resume or force):
        raise InputError(
            f"out: {folder} already holds a run ({found[0]}). Go on with it: {argument('resume', True)}; "
            f"replace it: {argument('force', True)}; or choose another folder."
        )


def clean(folder: Path) -> None:
    """Remove what a run that was killed left half written."""
    remove_leftovers(*(folder / name for name in (RECIPE, RUN, HISTORY, LAST, BEST)))


def clear(folder: Path) -> None:
    """Remove the files of an earlier run, and nothing else."""
    if not folder.is_dir():
        return
    try:
        for name in _OURS:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot remove the earlier run in {folder}: {error.strerror or error}") from error
