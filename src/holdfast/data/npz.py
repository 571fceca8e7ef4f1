"""Data sets of your own as one .npz file: x_train, y_train, x_test, y_test, or x and y; and a few optional arrays."""

import zipfile
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.data.cache import reading
from holdfast.data.dataset import Arrays, Dataset, make_dataset, make_split
from holdfast.errors import InputError

_REQUIRED = ("x_train", "y_train", "x_test", "y_test")
_OPTIONAL = ("boxes_train", "boxes_test", "classes", "layout")


def read_npz(path: Traversable, *, name: str, classes: Sequence[str] | None = None) -> Dataset:
    """Read a .npz file; nothing pickled is loaded.

    Args:
        path: the file, on disk or inside a package.
        name: name of the data set.
        classes: class names if the file has no array `classes` of strings.

    Images have the shape (N, C, H, W), (N, H, W, C) or (N, H, W); points have the shape (N, D). Where the place of the
    channels is not plain from the shape (exactly one of the two axes has size 1 or 3), the file must hold an array
    `layout` with the text "NCHW" or "NHWC".
    """
    with reading(path, zipfile.BadZipFile, KeyError, RuntimeError), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"'{path}' holds a single array; save several with np.savez: {', '.join(_REQUIRED)}")
        with archive:
            if {"x", "y"} <= set(archive.files) and "x_test" not in archive:
                whole = {key: archive[key] for key in ("x", "y", *_OPTIONAL) if key in archive}
                return _whole(whole, path, name, classes)
            has_splits = not {"x", "y"} & set(archive.files) or bool(set(_REQUIRED) & set(archive.files))
            missing = [key for key in (_REQUIRED if has_splits else ("x", "y")) if key not in archive]
            if missing:
                raise InputError(
                    f"'{path}' has no array '{missing[0]}'; expected {', '.join(_REQUIRED)}, or x and y, "
                    f"found {', '.join(archive.files) or 'none'}"
                )
            arrays = {key: archive[key] for key in (*_REQUIRED, *_OPTIONAL) if key in archive}
    layout = str(arrays["layout"]) if "layout" in arrays else None
    parts = [
        Arrays(
            _channels_first(arrays[f"x_{part}"], layout, f"'{path}', x_{part}"),
            arrays[f"y_{part}"],
            f"'{path}', {part} split",
            arrays.get(f"boxes_{part}"),
        )
        for part in ("train", "test")
    ]
    names = _class_names(arrays["classes"], path) if "classes" in arrays else classes
    return make_dataset(name, parts[0], parts[1], names)


def _whole(
    arrays: Mapping[str, npt.NDArray[Any]], path: Traversable, name: str, classes: Sequence[str] | None
) -> Dataset:
    """Data without splits: the arrays `x` and `y`."""
    layout = str(arrays["layout"]) if "layout" in arrays else None
    names = _class_names(arrays["classes"], path) if "classes" in arrays else classes
    part = Arrays(_channels_first(arrays["x"], layout, f"'{path}', x"), arrays["y"], f"'{path}'")
    split = make_split(part, None if names is None else len(names))
    names = [str(i) for i in range(int(split.y.max()) + 1)] if names is None else names
    return Dataset(name, split[:0], split, tuple(names), whole=split)


def _class_names(names: npt.NDArray[Any], path: Traversable) -> list[str]:
    if names.ndim != 1 or names.dtype.kind != "U":
        raise InputError(
            f"'{path}': classes must be a one-dimensional array of strings, got {names.dtype} of shape {names.shape}"
        )
    return [str(name) for name in names]


def _channels_first(x: npt.NDArray[Any], layout: str | None, where: str) -> npt.NDArray[Any]:
    if x.ndim == 2:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim != 4:
        raise InputError(f"{where} must have shape (N, C, H, W), (N, H, W, C), (N, H, W) or (N, D), got {x.shape}")
    if layout is None:
        first, last = x.shape[1] in (1, 3), x.shape[3] in (1, 3)
        if first == last:
            raise InputError(
                f"{where} has shape {x.shape}, which does not show where the channels are; "
                "add layout=np.array('NCHW') or layout=np.array('NHWC') to the file"
            )
        layout = "NCHW" if first else "NHWC"
    if layout not in ("NCHW", "NHWC"):
        raise InputError(f"{where}: layout must be 'NCHW' or 'NHWC', got '{layout}'")
    return x if layout == "NCHW" else x.transpose(0, 3, 1, 2)
