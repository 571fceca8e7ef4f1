"""One call for every data set: a known name, or the path of your own files."""

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.data.cache import cache_root, reading
from holdfast.data.cifar import find_cifar10, find_cifar100, read_cifar
from holdfast.data.dataset import Dataset
from holdfast.data.idx import find_idx, read_idx
from holdfast.data.image_folder import read_folder
from holdfast.data.image_list import read_image_list
from holdfast.data.npz import read_npz
from holdfast.data.sources import BUILTIN, SOURCES, find_source
from holdfast.data.svhn import find_svhn, read_svhn
from holdfast.errors import InputError, StorageError, did_you_mean

_ARCHIVES = (".tar.gz", ".tgz", ".tar")
_FOLDERS: tuple[tuple[Callable[[Path], Path | None], Callable[..., Dataset]], ...] = (
    (find_idx, read_idx),
    (find_cifar10, read_cifar),
    (find_cifar100, read_cifar),
    (find_svhn, read_svhn),
)


@dataclass(frozen=True)
class DataInfo:
    """A known data set: `size` is the bytes to download, `present` says that `load_data` would find it."""

    name: str
    summary: str
    size: int
    license: str
    present: bool


def list_data(root: str | os.PathLike[str] | None = None) -> list[DataInfo]:
    """All data sets known by name, and whether each is there already."""
    builtin = [DataInfo(each.name, each.summary, 0, each.license, True) for each in BUILTIN.values()]
    folder = cache_root(root)
    return builtin + [
        DataInfo(each.name, each.summary, each.size, each.license, find_source(each, folder) is not None)
        for each in SOURCES.values()
    ]


def load_data(
    source: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    n: int | None = None,
    noise: float | None = None,
    boxes: str | os.PathLike[str] | None = None,
    test_fraction: float | None = None,
) -> Dataset:
    """Load a data set by name, or from files of yours. Nothing is ever downloaded here; see `download`.

    Args:
        source: a name of `list_data()`, or the path of an .npz file, a CSV file that lists images and labels, an
            MNIST-style folder of idx files, a folder or archive of CIFAR batches, a folder with SVHN's .mat files, or a
            folder of class folders with images. A name wins over a path that is spelled the same; write ./mnist for
            the folder.
        root: folder to look for a named set in; the cache folder unless given.
        seed: decides the points of two-moons, the scenes of digit-scenes, and the test images of a folder that has no
            test folder.
        n: points of two-moons (1000 unless given), or scenes of digit-scenes (4000), in each split.
        noise: standard deviation of the noise of two-moons (0.1 unless given).
        boxes: CSV file of bounding boxes for a folder of images, with the columns file, x0, y0, x1, y1.
        test_fraction: share of each class to test on, for a folder of images without a test folder (0.2 unless given).

    >>> data = load_data("mnist-mini")
    >>> data.train.x.shape, len(data.test), data.classes[:3]
    (torch.Size([10000, 1, 28, 28]), 2000, ('0', '1', '2'))
    """
    name = os.fspath(source)
    options = {"n": n, "noise": noise, "boxes": boxes, "test_fraction": test_fraction}
    given = {option: value for option, value in options.items() if value is not None}
    if name in BUILTIN:
        _refuse(given, BUILTIN[name].options, name)
        return BUILTIN[name].make(**given, **({"seed": seed} if "seed" in BUILTIN[name].options else {}))
    if name in SOURCES:
        _refuse(given, (), name)
        return _load_named(name, root)
    path = Path(name).expanduser()
    if not path.exists():
        raise _not_found(name)
    read = _published_reader(path)
    _refuse(given, ("boxes", "test_fraction") if read is None else (), name)
    if read is not None:
        return read()
    return read_folder(
        path,
        name=path.resolve().name,
        boxes=None if boxes is None else Path(boxes).expanduser(),
        test_fraction=0.2 if test_fraction is None else test_fraction,
        seed=seed,
    )


def _refuse(given: Iterable[str], takes: Sequence[str], name: str) -> None:
    for option in given:
        if option not in takes:
            owners = [each.name for each in BUILTIN.values() if option in each.options] or ["a folder of images"]
            raise InputError(f"the option '{option}' is for {' and '.join(owners)}; it has no meaning for '{name}'")


def _load_named(name: str, root: str | os.PathLike[str] | None) -> Dataset:
    folder = cache_root(root)
    read = find_source(SOURCES[name], folder)
    if read is None:
        get = shlex.join(["holdfast", "data", "get", name, *([] if root is None else ["--root", str(folder)])])
        raise StorageError(
            f"'{name}' is not in '{folder}'. Run `{get}` to download it "
            f"({SOURCES[name].size / 1e6:.0f} MB), or pass the path of its files."
        )
    return read()


def _not_found(name: str) -> InputError | StorageError:
    if any(mark in name for mark in (os.sep, "/", ".", "~")):
        return StorageError(f"there is no file or folder '{name}'")
    return InputError(
        f"unknown data set '{name}', and no such file or folder. " + did_you_mean(name, (*BUILTIN, *SOURCES))
    )


def _published_reader(path: Path) -> Callable[[], Dataset] | None:
    """How to read a file, or a folder in one of the published layouts; None for any other folder."""
    name = path.resolve().name
    if path.is_dir():
        for find, read in _FOLDERS:
            with reading(path):
                found = find(path)
            if found is not None:
                return partial(read, found, name=name)
        return None
    if path.suffix == ".csv":
        return partial(read_image_list, path, name=path.stem)
    if path.suffix == ".npz":
        return partial(read_npz, path, name=path.stem)
    if name.endswith(_ARCHIVES):
        return partial(read_cifar, path, name=name.split(".")[0])
    if path.suffix == ".mat":
        return partial(read_svhn, path.parent, name=path.resolve().parent.name)
    raise InputError(
        f"'{path}' has no known format; expected .npz, .csv, .mat, {', '.join(_ARCHIVES)}, or a folder "
        "(idx files, CIFAR batches, SVHN, or class folders with images)"
    )
