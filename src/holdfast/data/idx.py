"""MNIST's idx files, plain or gzipped (format: Y. LeCun, "The MNIST database of handwritten digits", 1998).

An idx file is two zero bytes, a byte for the type (8 for uint8), a byte for the number of dimensions, the dimensions as
big-endian 32-bit integers, and then the values.
"""

import gzip
import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.data.cache import reading
from holdfast.data.dataset import Arrays, Dataset, make_dataset
from holdfast.errors import StorageError

STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_UINT8 = 8


def find_idx(folder: Path) -> Path | None:
    """`folder`, if it holds all four files under their usual names."""
    return folder if all(_file(folder, stem) for stem in STEMS) else None


def read_idx(folder: Path, *, name: str, classes: Sequence[str] | None = None) -> Dataset:
    """The four files of an MNIST-style folder."""
    files = [_file(folder, stem) or folder / stem for stem in STEMS]
    images, labels, test_images, test_labels = (read_idx_file(file) for file in files)
    train = Arrays(images[:, None], labels, str(files[0]))
    test = Arrays(test_images[:, None], test_labels, str(files[2]))
    return make_dataset(name, train, test, classes)


def _file(folder: Path, stem: str) -> Path | None:
    return next((f for f in (folder / stem, folder / f"{stem}.gz") if f.is_file()), None)


def read_idx_file(path: Path) -> npt.NDArray[np.uint8]:
    """The array in one idx file of bytes."""
    with reading(path):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    expected = 1 if "idx1" in path.name else 3
    start = 4 + 4 * expected
    if len(content) < start or content[:4] != bytes([0, 0, _UINT8, expected]):
        raise StorageError(
            f"'{path}' is not an idx file of bytes with {expected} dimension(s): it begins with "
            f"{content[:4].hex(' ') or 'nothing'}, expected 00 00 08 {expected:02x}. Get the file again."
        )
    shape = struct.unpack(f">{expected}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise StorageError(
            f"'{path}' announces {math.prod(shape)} values of shape {shape} but holds {len(content) - start}; "
            "it is truncated or corrupt. Get the file again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
