"""Where data files lie, and how a failure to read one is told."""

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path

from holdfast.errors import HoldfastError, StorageError, argument


def cache_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Folder of downloaded data sets: `root` if given, else HOLDFAST_CACHE, else the platform's cache folder."""
    if root is not None:
        return Path(root).expanduser()
    chosen = os.environ.get("HOLDFAST_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "holdfast"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "holdfast" / "Cache"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "holdfast"


@contextmanager
def reading(path: Path | Traversable, *also: type[Exception]) -> Iterator[None]:
    """Turn what goes wrong while `path` is read or parsed into a StorageError that names the file.

    Args:
        path: the file being read.
        also: exceptions of the parser, besides the standard library's, that mean the file is corrupt.
    """
    corrupt: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, zlib.error, *also)
    try:
        yield
    except HoldfastError:
        raise
    except FileNotFoundError as error:
        raise StorageError(f"there is no file '{path}'") from error
    except PermissionError as error:
        raise StorageError(f"no permission to read '{path}'; change its mode or copy it elsewhere") from error
    except corrupt as error:
        raise StorageError(
            f"cannot read '{path}': it is truncated, corrupt or of another format "
            f"({type(error).__name__}: {error}). Get the file again."
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write `path` into a StorageError that says what to do."""
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write '{path}' ({error.strerror or error}). Free some space, change the permission, "
            f"or choose another folder with {argument('root')} or the environment variable HOLDFAST_CACHE."
        ) from error
