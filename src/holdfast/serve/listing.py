"""What there is below the folder of runs. Read only; no link is followed, and no path from outside reaches the disk."""

import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from holdfast.serve.run_curves import BYTES, Curve, read_curves
from holdfast.utils.limits import LARGEST, parse_json

PROGRESS, RESULT, STORE = "progress.json", "audit.json", "audit.sqlite"
ABOUT, HISTORY, MODEL = "run.json", "history.csv", "model.safetensors"
FILES = {
    "report.html": "text/html; charset=utf-8",
    "audit.json": "application/json",
    "results.csv": "text/csv; charset=utf-8",
    "badge.svg": "image/svg+xml",
    "model-card.md": "text/markdown; charset=utf-8",
}
"""The files of a run that can be asked for, with their types."""
DEPTH, MOST = 5, 1000  # how deep runs are looked for, and how many are listed
SILENT = 300.0  # seconds without a sign of life after which a run counts as stopped
NOTE = 2**20  # bytes of progress.json and run.json


@dataclass(frozen=True)
class BracketNow:
    """The bracket of one threat so far: counts of `inputs`; None where nothing is known yet."""

    threat: str
    inputs: int
    clean: int | None
    certified: int | None
    attacked: int | None


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells.

    Attributes:
        name: path below the folder of runs, with slashes.
        kind: "audit" or "train".
        state: "running", "silent" (said to be running, but not heard of for long), "finished", "failed", "stopped"
            (killed before it could say anything) or "unreadable".
        model: what the audited model is called.
        data: name of the data.
        created, updated: UTC, ISO 8601; empty if not known.
        step: what is being done.
        done, total: number of its parts.
        seconds: time spent so far.
        error: why it failed.
        headline: the answer of a finished audit in one sentence.
        brackets: one for each threat.
        files: the ones of `FILES` that are there.
        curves: of a training run, epoch by epoch.
    """

    name: str
    kind: str
    state: str
    model: str = ""
    data: str = ""
    created: str = ""
    updated: str = ""
    step: str = ""
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    error: str = ""
    headline: str = ""
    brackets: tuple[BracketNow, ...] = ()
    files: tuple[str, ...] = field(default=())
    curves: tuple[Curve, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return asdict(self)


def list_runs(root: Path) -> list[Run]:
    """All runs below `root`, running ones first, then the newest; only `root` if it is a run itself."""
    found = [run for name, folder in find_folders(root) if (run := read_run(name, folder)) is not None]
    newest = sorted(found, key=lambda run: run.updated or run.created, reverse=True)
    return sorted(newest, key=lambda run: run.state != "running")


def find_folders(root: Path) -> Iterator[tuple[str, Path]]:
    """Name and folder of each run below `root`; hidden folders and links are passed over."""
    if _is_run(root):
        yield root.resolve().name or "run", root
        return
    level, count = [("", root)], 0
    for _ in range(DEPTH):
        below = [(f"{prefix}{name}", path) for prefix, folder in level for name, path in _folders(folder)]
        for name, path in below:
            if _is_run(path):
                yield name, path
                count += 1
                if count == MOST:
                    return
        level = [(f"{name}/", path) for name, path in below]


def _folders(folder: Path) -> list[tuple[str, Path]]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    except OSError:  # gone, or no permission: nothing to show
        return []
    # A name that is no text would have no address.
    return [(name, folder / name) for name in sorted(names) if name.isprintable()]


def _is_run(folder: Path) -> bool:
    return any(plain(folder / name) for name in (PROGRESS, RESULT, STORE, ABOUT))


def plain(path: Path) -> bool:
    """Is there a file, not a link to one?"""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def find_run(root: Path, name: str) -> Path | None:
    """Folder of the run that is listed under this name; None if none is."""
    return next((folder for known, folder in find_folders(root) if known == name), None)


def read_file(root: Path, name: str, file: str) -> bytes | None:
    """Content of a file of a run; None if there is no such run, or it has no such file, or it is none of `FILES`."""
    folder = find_run(root, name) if file in FILES else None
    return None if folder is None else _read(folder / file, LARGEST)


def _read(path: Path, most: int) -> bytes | None:
    """Content of a plain file of at most `most` bytes; the file that is looked at is the one that is read."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(handle)
            return file.read() if stat.S_ISREG(about.st_mode) and about.st_size <= most else None
    except OSError:
        return None


def read_json(path: Path, most: int = NOTE) -> dict[str, Any] | None:
    """A JSON object; None if there is none, or it cannot be read."""
    content = _read(path, most)
    try:
        body = None if content is None else parse_json(content)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def read_run(name: str, folder: Path) -> Run | None:
    """What the folder tells; None if it is no run any more."""
    files = tuple(file for file in FILES if plain(folder / file))
    if plain(folder / PROGRESS):
        return _from_progress(name, folder, files)
    if RESULT in files:
        answer = _answer(folder)
        return Run(name, "audit", "finished" if answer else "unreadable", **answer, files=files)
    if plain(folder / STORE):
        return Run(name, "audit", "stopped", files=files)
    about = read_json(folder / ABOUT)
    if about is None:
        return None
    data = _text(about.get("data"))
    curves = read_curves(_read(folder / HISTORY, BYTES))
    if plain(folder / MODEL):
        updated = _changed(folder / MODEL)
        return Run(name, "train", "finished", data=data, updated=updated, files=files, curves=curves)
    # It has no progress.json; a row of its history comes with each epoch.
    updated = max(_changed(folder / file) for file in (ABOUT, HISTORY))
    going = _age(updated) <= SILENT
    state, step = ("running", "training") if going else ("stopped", "")
    return Run(name, "train", state, data=data, updated=updated, step=step, files=files, curves=curves)


def _from_progress(name: str, folder: Path, files: tuple[str, ...]) -> Run:
    note = read_json(folder / PROGRESS)
    if note is None or note.get("state") not in ("running", "finished", "failed"):
        return Run(name, "audit", "unreadable", files=files)
    state, updated = str(note["state"]), _text(note.get("updated"))
    if state == "running" and _age(updated) > SILENT:
        state = "silent"
    headline = str(_answer(folder).get("headline", "")) if state == "finished" else ""
    return Run(
        name,
        "audit",
        state,
        model=_text(note.get("name")),
        data=_text(note.get("data")),
        created=_text(note.get("created")),
        updated=updated,
        step=_text(note.get("step")),
        done=_count(note.get("done")) or 0,
        total=_count(note.get("total")) or 0,
        seconds=_seconds(note.get("seconds")),
        error=_text(note.get("error")),
        headline=headline,
        brackets=_brackets(note.get("brackets")),
        files=files,
    )


def _answer(folder: Path) -> dict[str, Any]:
    """What audit.json says, as arguments of `Run`; empty if it cannot be read."""
    try:
        about = (folder / RESULT).lstat()
    except OSError:
        return {}
    return _parsed_answer(folder / RESULT, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=MOST)
def _parsed_answer(path: Path, changed: int, size: int) -> dict[str, Any]:
    """The file has an entry for each input; it is read once for each time that it was written."""
    body = read_json(path, LARGEST)
    if body is None:
        return {}
    answer: dict[str, Any] = {key: _text(body.get(key)) for key in ("data", "created", "headline")}
    rows = body.get("brackets")
    for row in rows if isinstance(rows, list) else []:
        levels = row.get("levels") if isinstance(row, dict) else None
        if isinstance(levels, list) and levels and all(isinstance(level, dict) for level in levels):
            last = {**levels[-1], "threat": row.get("threat"), "clean": levels[0].get("attacked")}
            if row.get("proved") is False:
                last["certified"] = None
            answer["brackets"] = (*answer.get("brackets", ()), *_brackets([last]))
    return answer | {"model": _text(body.get("name")), "updated": answer["created"]}


def _brackets(rows: object) -> tuple[BracketNow, ...]:
    found = []
    for row in rows if isinstance(rows, list) else []:
        inputs = _count(row.get("inputs")) if isinstance(row, dict) else None
        if inputs:
            counts = [_count(row.get(key)) for key in ("clean", "certified", "attacked")]
            within = [None if count is None else min(count, inputs) for count in counts]
            found.append(BracketNow(_text(row.get("threat")), inputs, *within))
    return tuple(found)


def _text(value: object) -> str:
    """Text that JSON can carry, cut at 500 characters; empty for anything else."""
    return value[:500].encode(errors="replace").decode() if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0


def _age(moment: str) -> float:
    """Seconds since a moment in ISO 8601; without end if it cannot be read."""
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return float("inf")
    return (datetime.now(UTC) - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()


def _changed(path: Path) -> str:
    """When a file was last written, UTC, ISO 8601."""
    try:
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC).isoformat(timespec="seconds")
    except OSError:
        return ""
