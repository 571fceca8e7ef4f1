"""Data as users have them: a name, a path, tensors, arrays, a torch Dataset or a DataLoader."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from holdfast.data.dataset import Arrays, Dataset, Split, make_split
from holdfast.data.load import load_data
from holdfast.errors import InputError

Pair = tuple[Tensor | npt.NDArray[Any], Tensor | npt.NDArray[Any]]
Given = Dataset | str | os.PathLike[str] | Pair | TorchDataset[Any] | DataLoader[Any]
_WAYS = "a data set, its name, a path, a pair (x, y) of tensors or arrays, a torch Dataset or a DataLoader"


def as_dataset(data: Given) -> Dataset:
    """Any form of data as a `Dataset`; what has no split of its own is kept whole.

    Args:
        data: a `Dataset`, a name or path for `load_data`, a pair (x, y) of tensors or NumPy arrays, a torch Dataset of
            pairs (image, label), or a DataLoader. Images are uint8 in 0 to 255 or float in [0, 1].
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str | os.PathLike):
        return load_data(data)
    if isinstance(data, tuple | list):
        if len(data) != 2 or not all(isinstance(part, Tensor | np.ndarray) for part in data):
            kinds = ", ".join(type(part).__name__ for part in data)
            raise InputError(f"data must be {_WAYS}, got ({kinds})")
        return _whole("tensors", data[0], data[1], ())
    if isinstance(data, DataLoader):
        x, y = _collected((batch for batch in data), batched=True)
        return _whole(type(data.dataset).__name__, x, y, _class_names(data.dataset))
    if isinstance(data, TorchDataset):
        if not hasattr(data, "__len__"):
            raise InputError("an iterable Dataset has no length; wrap it in a DataLoader, or give tensors")
        x, y = _collected((data[i] for i in range(len(data))), batched=False)
        return _whole(type(data).__name__, x, y, _class_names(data))
    raise InputError(f"data must be {_WAYS}, got {type(data).__name__}")


def _whole(name: str, x: Tensor | npt.NDArray[Any], y: Tensor | npt.NDArray[Any], classes: Sequence[str]) -> Dataset:
    if 0 in (x.ndim, y.ndim) or len(x) != len(y):
        shapes = f"inputs of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}"
        raise InputError(f"data need one label for each input, got {shapes}")
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point():
        split = Split(x, y)  # tensors keep dtype and device; the front door checks their range
    else:
        split = make_split(Arrays(_array(x), _array(y), name), len(classes) or None)
    return Dataset(name, split[:0], split, tuple(str(c) for c in classes), whole=split)


def _array(value: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _collected(items: Iterable[Any], *, batched: bool) -> tuple[Tensor, Tensor]:
    """All inputs and labels of an iterable of pairs, or of batches of pairs."""
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for i, item in enumerate(items):
        what = f"{'batch' if batched else 'item'} {i} of the data"
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise InputError(f"{what} must be a pair (image, label), got {type(item).__name__}")
        x, y = _pixels(item[0], what), torch.as_tensor(item[1])
        x, y = (x, y) if batched else (x[None], y.reshape(1))
        if xs and x.shape[1:] != xs[0].shape[1:]:
            shapes = f"{tuple(x.shape[1:])}, the first one {tuple(xs[0].shape[1:])}"
            raise InputError(f"{what} has shape {shapes}; all must have the same size: resize or crop them first")
        xs.append(x)
        ys.append(y)
    if not xs:
        raise InputError("the data are empty")
    return torch.cat(xs), torch.cat(ys).long()


def _pixels(value: Any, what: str) -> Tensor:
    """One image or batch as float in [0, 1]; pictures of Pillow and arrays of bytes are converted."""
    if isinstance(value, Tensor):
        return value.float() / 255 if value.dtype == torch.uint8 else value
    array = np.asarray(value)
    if array.dtype == object or array.ndim == 0:
        raise InputError(f"{what} must hold an image as tensor, array or picture, got {type(value).__name__}")
    if hasattr(value, "getbands"):  # a picture of Pillow: rows, columns, channels
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    tensor = torch.from_numpy(np.array(array, order="C"))
    return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float()


def _class_names(dataset: object) -> tuple[str, ...]:
    """The names that torchvision's data sets carry."""
    names = getattr(dataset, "classes", None)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()
