"""What a data set is: two splits of inputs and labels, checked once when they are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.checks import check_inputs, check_labels
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.utils.show import Shown

_MOST_CLASSES = 100_000  # where the number of classes is not given, a label beyond this is damage, not a class


@dataclass(frozen=True, eq=False, repr=False)
class Split(Shown):
    """One part of a data set.

    Attributes:
        x: inputs in [0, 1], float32, shape (N, C, H, W), or (N, D) for points.
        y: class indices, int64, shape (N,).
        boxes: the object in each image as x0, y0, x1, y1 in pixels (x1 and y1 excluded), float32, shape (N, 4).
    """

    x: Tensor
    y: Tensor
    boxes: Tensor | None = None

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def __getitem__(self, selection: Tensor | slice) -> "Split":
        """Some of the inputs, by slice, mask (N,) or indices."""
        boxes = None if self.boxes is None else self.boxes[selection]
        return Split(self.x[selection], self.y[selection], boxes)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset(Shown):
    """A named pair of training and test split; `classes` holds one name per class index.

    `whole` holds everything where the source has no splits of its own, and the two splits are cut from it: an audit
    looks at all of it.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    whole: Split | None = None


class Arrays(NamedTuple):
    """One split as a reader found it, before any check; `where` names the file for error messages."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    where: str
    boxes: npt.NDArray[Any] | None = None


def make_dataset(name: str, train: Arrays, test: Arrays, classes: Sequence[str] | None = None) -> Dataset:
    """Check both splits and turn them into tensors; without `classes` the names are the class numbers.

    Images are uint8 in 0 ... 255 or float in [0, 1], shape (N, C, H, W); labels are integers, shape (N,) or (N, 1).
    """
    splits = [make_split(part, None if classes is None else len(classes)) for part in (train, test)]
    if classes is None:
        classes = [str(i) for i in range(1 + max(int(split.y.max()) for split in splits))]
    if splits[0].x.shape[1:] != splits[1].x.shape[1:]:
        raise InputError(
            f"training inputs have shape {tuple(splits[0].x.shape[1:])} ({train.where}) but test inputs have "
            f"{tuple(splits[1].x.shape[1:])} ({test.where}); they must be the same"
        )
    return Dataset(name, splits[0], splits[1], tuple(classes))


def make_split(part: Arrays, classes: int | None = None) -> Split:
    """Check one split and turn it into tensors; labels must lie below `classes`."""
    try:
        x, y = _pixels(part.x), _labels(part.y)
        check_inputs(x)
        check_labels(y, x.shape[0], _MOST_CLASSES if classes is None else classes)
        return Split(x, y, None if part.boxes is None else _boxes(part.boxes, x))
    except InputError as error:
        raise InputError(f"{part.where}: {error}") from error


def _labels(y: npt.NDArray[Any]) -> Tensor:
    if y.dtype.kind not in "iu":
        raise InputError(f"labels must be integers (class indices from 0), got {y.dtype}")
    return torch.from_numpy((y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y).astype(np.int64))


def _pixels(x: npt.NDArray[Any]) -> Tensor:
    """Float32 in [0, 1]: bytes are divided by 255, floats are taken as they are."""
    if x.dtype == np.uint8 or x.dtype.kind == "f":
        pixels = torch.from_numpy(x.astype(np.float32, order="C"))
        return pixels.div_(255) if x.dtype == np.uint8 else pixels
    raise InputError(f"inputs must be uint8 in 0 to 255 or float in [0, 1], got {x.dtype}")


def _boxes(array: npt.NDArray[Any], x: Tensor) -> Tensor:
    if x.ndim != 4 or array.shape != (x.shape[0], 4) or array.dtype.kind not in "iuf":
        raise InputError(
            f"boxes must be numbers x0, y0, x1, y1 of shape ({x.shape[0]}, 4), one row per image, "
            f"got {array.dtype} of shape {array.shape} for inputs of shape {tuple(x.shape)}"
        )
    boxes = torch.from_numpy(array.astype(np.float32))
    height, width = x.shape[2:]
    x0, y0, x1, y1 = boxes.unbind(1)
    # Written so that NaN, which compares as false, is refused as well.
    good = (x0 >= 0) & (x0 < x1) & (x1 <= width) & (y0 >= 0) & (y0 < y1) & (y1 <= height)
    if not bool(good.all()):
        i = int((~good).nonzero()[0])
        raise InputError(
            f"box {boxes[i].tolist()} of input {i} must satisfy 0 <= x0 < x1 <= {width} and 0 <= y0 < y1 <= {height}"
        )
    return boxes


def split_validation(split: Split, fraction: float, seed: int = 0) -> tuple[Split, Split]:
    """Hold out a share of each class for validation: (the rest, the held-out part).

    The choice depends on the labels, `fraction` and `seed` only, and is the same on every machine. Each class gives
    round(fraction * its size) inputs; both parts keep the order of `split`.

    >>> train = Split(torch.zeros(10, 1, 2, 2), torch.arange(10) % 2)
    >>> rest, validation = split_validation(train, 0.2)
    >>> len(rest), sorted(validation.y.tolist())
    (8, [0, 1])
    """
    if not 0 < fraction < 1:
        raise InputError(f"the fraction to hold out must lie between 0 and 1 (both excluded), got {fraction}")
    y = split.y.cpu()
    order = Noise.for_batch(seed, len(split)).bits(()).argsort()
    held_out = torch.zeros(len(split), dtype=torch.bool)
    for label in set(y.tolist()):
        members = order[y[order] == label]
        held_out[members[: round(fraction * len(members))]] = True
    if not bool(held_out.any()) or bool(held_out.all()):
        raise InputError(
            f"holding out {fraction:g} of each class of {len(split)} inputs leaves one part empty; "
            "use another fraction or more data"
        )
    mask = held_out.to(split.y.device)
    return split[~mask], split[mask]
