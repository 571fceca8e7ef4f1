"""Downloads that can be interrupted: they go on where they stopped, and a file appears only once it is complete."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from holdfast.data.cache import cache_root, reading, writing
from holdfast.data.sources import BUILTIN, SOURCES
from holdfast.errors import InputError, StorageError, did_you_mean, either
from holdfast.utils.progress import shows_progress

_CHUNK = 1 << 18  # bytes per read; decides only how often the bar moves


def download(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    progress: bool = True,
    mirror: str | None = None,
    timeout: float = 30.0,
) -> Path:
    """Download a data set into root/NAME and return that folder; files that are there and whole are kept.

    Each file is received into FILE.part and renamed after its MD5 sum has been verified. A second call after an
    interruption asks the server for the missing rest only.

    Args:
        name: one of the downloadable sets of `list_data()`.
        root: where to put it; the cache folder unless given.
        progress: show a bar on standard error.
        mirror: http(s) address of a folder with the same files, instead of the canonical one.
        timeout: seconds without any data after which the server counts as silent.
    """
    if name in BUILTIN:
        raise InputError(
            f"'{name}' comes with Holdfast and needs no download: " + either(f"load_data('{name}')", f"--data {name}")
        )
    if name not in SOURCES:
        raise InputError(f"unknown data set '{name}'. " + did_you_mean(name, SOURCES))
    source = SOURCES[name]
    base = (mirror or source.url).rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise InputError(f"the mirror must be an http:// or https:// address, got '{mirror}'")
    folder = cache_root(root) / name
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}"), *columns, console=Console(stderr=True), disable=not shows_progress(progress)
    ) as bars:
        for file in source.files:
            task = bars.add_task(file.name, total=file.size)
            download_file(
                f"{base}/{file.name}",
                folder / file.name,
                file.md5,
                on_progress=lambda done, task=task: bars.update(task, completed=done),  # type: ignore[misc]
                timeout=timeout,
            )
    return folder


def download_file(
    url: str, target: Path, md5: str, *, on_progress: Callable[[int], None] = lambda done: None, timeout: float = 30.0
) -> None:
    """Download one file, resuming target.part if it exists; `on_progress` is told the bytes that are there."""
    if target.is_file() and _md5(target) == md5:
        on_progress(target.stat().st_size)
        return
    part = target.with_name(f"{target.name}.part")
    _receive(url, part, on_progress, timeout)
    found = _md5(part)
    with writing(target):
        if found != md5:
            part.unlink()
            raise StorageError(
                f"{url} has the MD5 sum {found}, expected {md5}: the file was changed or damaged on its way, "
                "and has been deleted. Try again, or use another mirror."
            )
        os.replace(part, target)


def _receive(url: str, part: Path, on_progress: Callable[[int], None], timeout: float) -> None:
    """Append to `part` what the server has beyond it."""
    start = part.stat().st_size if part.is_file() else 0
    response = _request(url, start, timeout)
    if response is None:
        return
    with response:
        # A server that ignores the range answers 200 and sends the whole file.
        done = start if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with writing(part), part.open("ab" if done else "wb") as file:
            for chunk in _chunks(response, url):
                file.write(chunk)
                done += len(chunk)
                on_progress(done)
    if total is not None and done < total:
        raise StorageError(
            f"{url}: the connection closed after {done:,} of {total:,} bytes. Run the same command again to go on."
        )


def _request(url: str, start: int, timeout: float) -> http.client.HTTPResponse | None:
    """The server's answer, or None if it has nothing beyond byte `start`: the checksum then decides."""
    headers = {"User-Agent": "holdfast"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout
        )
        return response
    except urllib.error.HTTPError as error:
        with error:
            if start and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return None
            raise StorageError(
                f"{url}: the server answered {error.code} {error.reason}. Use another mirror, "
                "or get the files yourself and pass their folder."
            ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise StorageError(
            f"cannot reach {url} ({reason}). Check the network or the proxy, use another mirror, "
            "or get the files yourself and pass their folder."
        ) from error


def _chunks(response: http.client.HTTPResponse, url: str) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(
                f"{url}: the connection broke ({error}). Run the same command again to go on."
            ) from error
        if not chunk:
            return
        yield chunk


def _md5(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
