"""Street View House Numbers, cropped digits, as two .mat files.

SciPy's reader of .mat files can bring the process down on a damaged one, so the small part of MATLAB's format (level 5)
that plain numeric arrays need is read here: a header of 128 bytes, then elements of (type, size, content), which may be
compressed (MathWorks, "MAT-file format").
Data: Netzer et al., "Reading digits in natural images with unsupervised feature learning", 2011.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.data.cache import reading
from holdfast.data.dataset import Arrays, Dataset, make_dataset
from holdfast.errors import InputError

FILES = ("train_32x32.mat", "test_32x32.mat")

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_NUMERIC_CLASSES = range(6, 16)
_DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}


def find_svhn(folder: Path) -> Path | None:
    """`folder`, if it holds both files under their usual names."""
    return folder if all((folder / file).is_file() for file in FILES) else None


def read_svhn(folder: Path, *, name: str, classes: Sequence[str] | None = None) -> Dataset:
    """The training and the test file of a folder; the digit zero, which the files call 10, becomes class 0."""
    train, test = (_read_split(folder / file) for file in FILES)
    return make_dataset(name, train, test, classes or [str(digit) for digit in range(10)])


def _read_split(path: Path) -> Arrays:
    with reading(path, struct.error):
        content = read_mat(path.read_bytes())
    missing = [key for key in ("X", "y") if key not in content]
    if missing:
        raise InputError(
            f"'{path}' has no numeric array '{missing[0]}'; expected X of shape (H, W, C, N) and y of shape (N, 1)"
        )
    images, labels = content["X"], content["y"]
    if images.ndim != 4:
        raise InputError(f"'{path}': X must have shape (H, W, C, N), got {images.shape}")
    return Arrays(images.transpose(3, 2, 0, 1), np.where(labels == 10, np.zeros_like(labels), labels), f"'{path}'")


def read_mat(content: bytes) -> dict[str, npt.NDArray[Any]]:
    """The real numeric arrays of a .mat file by name, in the type they are stored in; other variables are left out."""
    order = {b"IM": "<", b"MI": ">"}.get(content[126:_HEADER])
    if order is None or struct.unpack(f"{order}H", content[124:126])[0] != 0x0100:
        raise ValueError("not a MATLAB level 5 file; from MATLAB, save with -v7")
    arrays = {}
    for kind, data in _elements(memoryview(content)[_HEADER:], order):
        inner = [(kind, data)] if kind != _COMPRESSED else _elements(memoryview(zlib.decompress(data)), order)
        for inner_kind, matrix in inner:
            named = _matrix(matrix, order) if inner_kind == _MATRIX else None
            if named is not None:
                arrays[named[0]] = named[1]
    return arrays


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """(type, content) of each element."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        start = at + 8
        if kind >> 16:  # up to four bytes are packed into the tag itself
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
            if size > 4:
                raise ValueError(f"short element of {size} bytes")
        if start + size > len(data):
            raise ValueError(f"element of {size} bytes where {len(data) - start} are left")
        yield kind, data[start : start + size]
        at = start + size
        if kind != _COMPRESSED:
            at += -at % 8


def _matrix(data: memoryview, order: str) -> tuple[str, npt.NDArray[Any]] | None:
    """Name and array of a numeric variable; None for complex numbers, text, cells and the like."""
    parts = list(_elements(data, order))
    if len(parts) != 4:
        return None
    (_, flags), (_, sizes), (_, name), (kind, values) = parts
    if struct.unpack_from(f"{order}I", flags)[0] & 0xFF not in _NUMERIC_CLASSES or kind not in _DTYPES:
        return None
    shape = struct.unpack(f"{order}{len(sizes) // 4}i", sizes)
    array: npt.NDArray[Any] = np.frombuffer(values, order + _DTYPES[kind]).reshape(shape, order="F")
    return bytes(name).decode("ascii"), array
