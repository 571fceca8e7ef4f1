"""CIFAR-10 and CIFAR-100 as their authors publish them: Python pickles, read without running anything in them.

Unpickling a foreign file can run any code. The unpickler here knows only the few names that a pickled array needs, maps
them to inert stand-ins of our own (not even NumPy's code sees the file's state), and refuses the rest.
Data: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

import io
import pickle
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from holdfast.data.cache import reading
from holdfast.data.dataset import Arrays, Dataset, make_dataset
from holdfast.errors import InputError, StorageError


@dataclass(frozen=True)
class Layout:
    """Names that one of the two data sets uses."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    label_names: str


CIFAR10 = Layout(
    archive="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    labels="labels",
    label_names="label_names",
)
CIFAR100 = Layout(
    archive="cifar-100-python.tar.gz",
    folder="cifar-100-python",
    train=("train",),
    test="test",
    meta="meta",
    labels="fine_labels",
    label_names="fine_label_names",
)
_LAYOUTS = (CIFAR10, CIFAR100)


def find_cifar10(path: Path) -> Path | None:
    """The batches of CIFAR-10 in or at `path`: a folder with the batch files, or the archive."""
    return _find(path, CIFAR10)


def find_cifar100(path: Path) -> Path | None:
    """The files of CIFAR-100 in or at `path`: a folder with the files, or the archive."""
    return _find(path, CIFAR100)


def _find(path: Path, layout: Layout) -> Path | None:
    for folder in (path, path / layout.folder):
        if all((folder / file).is_file() for file in (*layout.train, layout.test)):
            return folder
    archive = path / layout.archive
    return archive if archive.is_file() else None


def read_cifar(path: Path, *, name: str, classes: Sequence[str] | None = None) -> Dataset:
    """CIFAR-10 or CIFAR-100 (fine labels) from a folder or a tar archive, whichever of the two it holds."""
    files = _tar_files(path) if path.is_file() else _folder_files(path)
    layout = next((each for each in _LAYOUTS if each.train[0] in files), None)
    if layout is None:
        raise InputError(
            f"'{path}' holds neither CIFAR-10 ({CIFAR10.train[0]}, ..., {CIFAR10.test}) "
            f"nor CIFAR-100 ({CIFAR100.train[0]}, {CIFAR100.test})"
        )
    batches = {}
    for file in (*layout.train, layout.test):
        if file not in files:
            raise StorageError(f"'{path}' has no file '{file}'; the set is incomplete. Get it again.")
        batches[file] = _batch(files.pop(file), f"'{path}', {file}", layout.labels)
    x, y = (np.concatenate([batches[file][i] for file in layout.train]) for i in (0, 1))
    if layout.meta in files:
        entry = read_pickle(files[layout.meta], f"'{path}', {layout.meta}")
        names = entry.get(layout.label_names)
        classes = [_text(label) for label in names] if isinstance(names, list) and names else classes
    test = Arrays(*batches[layout.test], f"'{path}', {layout.test}")
    return make_dataset(name, Arrays(x, y, f"'{path}', {layout.train[0]} ..."), test, classes)


def _wanted() -> set[str]:
    return {file for layout in _LAYOUTS for file in (*layout.train, layout.test, layout.meta)}


def _folder_files(folder: Path) -> dict[str, bytes]:
    found = [folder / file for file in sorted(_wanted()) if (folder / file).is_file()]
    content = {}
    for path in found:
        with reading(path):
            content[path.name] = path.read_bytes()
    return content


def _tar_files(path: Path) -> dict[str, bytes]:
    """Content of the members that matter; nothing is written to disk, so a member's path cannot do harm."""
    content = {}
    with reading(path, tarfile.TarError), tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if Path(member.name).name in _wanted() else None
            if file is not None:
                content[Path(member.name).name] = file.read()
    return content


def _batch(content: bytes, where: str, label_key: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Images (N, 3, 32, 32) and labels (N,) of one batch."""
    entry = read_pickle(content, where)
    data, labels = entry.get("data"), entry.get(label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * 32 * 32:
        found = f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise InputError(f"{where}: 'data' must be a uint8 array of shape (N, 3072), got {found}")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise InputError(f"{where}: '{label_key}' must be a list of {len(data)} integers")
    return data.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class _Dtype:
    """Stand-in for numpy.dtype: keeps the name of a plain number type and nothing else."""

    def __init__(self, name: str | bytes, *flags: object) -> None:
        self.name = _text(name)
        self.order = "|"

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.order = _text(state[1])

    def plain(self) -> np.dtype[Any]:
        if self.name not in ("u1", "i1", "i2", "i4", "i8", "f4", "f8") or self.order not in ("|", "<", ">", "="):
            raise pickle.UnpicklingError(f"array of type '{self.order}{self.name}'; only plain numbers are read")
        return np.dtype(self.order.replace("|", "=") + self.name)


class _Array:
    """Stand-in for numpy.ndarray: collects the pickled state, from which `array` is then built."""

    def __init__(self, *ignored: object) -> None:
        self.array: npt.NDArray[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, fortran, raw = state
        self._fill(raw, dtype, shape, "F" if fortran else "C")

    def _fill(self, raw: bytes | bytearray, dtype: object, shape: tuple[int, ...], order: str) -> None:
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray) or order not in ("C", "F"):
            raise pickle.UnpicklingError("array whose content is not raw numbers")
        self.array = np.frombuffer(raw, dtype.plain()).reshape(shape, order="C" if order == "C" else "F")


class _BufferArray(_Array):
    """Stand-in for the function that rebuilds an array from a buffer (pickle protocol 5)."""

    def __init__(self, raw: bytes, dtype: object, shape: tuple[int, ...], order: str = "C", *rest: object) -> None:
        self._fill(raw, dtype, shape, order)


_STAND_INS: dict[tuple[str, str], type] = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _Dtype}
for _core in ("core", "_core"):  # the package moved in NumPy 2
    _STAND_INS[f"numpy.{_core}.multiarray", "_reconstruct"] = _Array
    _STAND_INS[f"numpy.{_core}.numeric", "_frombuffer"] = _BufferArray


class _ForbiddenName(pickle.UnpicklingError):
    """The pickle asks for something that arrays and containers do not need."""


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise _ForbiddenName(f"{module}.{name}") from None

    def persistent_load(self, pid: object) -> NoReturn:
        raise _ForbiddenName("a persistent object")


def read_pickle(content: bytes, where: str) -> dict[str, Any]:
    """A pickled dictionary of numbers, texts, containers and plain arrays; its keys as str."""
    try:
        entry = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _ForbiddenName as error:
        raise InputError(
            f"{where}: refused. The pickle asks for {error}, which could run code; a CIFAR batch needs only arrays, "
            "lists and text. Do not trust this file."
        ) from error
    # A damaged pickle makes the machine trip anywhere: wrong stack, missing memo, bad lengths, foreign attributes.
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
        MemoryError,
    ) as error:  # fmt: skip
        raise StorageError(
            f"{where}: not a readable pickle ({type(error).__name__}: {error}). Get it again."
        ) from error
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected a pickled dictionary, got {type(entry).__name__}")
    return {_text(key): value.array if isinstance(value, _Array) else value for key, value in entry.items()}
