"""Detections as a vector: bins, an order inside each bin, and +inf where there is nothing.

Median smoothing needs a function with a fixed number of real outputs, of which each means the same object from one
noisy copy to the next. A detector gives a list of any length and in any order. The encoding puts each detection into a
bin (by label, by place, by both), sorts each bin, and gives the k-th of bin b the slot (b, k). Slots that are not used
hold +inf in all columns, which sorts last: half of the copies must have an object for its median to be finite.
(Chiang et al., "Detection as regression: certified object detection by median smoothing", 2020.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from holdfast.apps.detection.boxes import COLUMNS, LABEL, OBJECTNESS, SCORE, check_detections
from holdfast.apps.detection.suppression import lexicographic
from holdfast.errors import InputError

Bins = Literal["none", "label", "location", "location+label"]
Sort = Literal["objectness", "location"]


@dataclass(frozen=True)
class Encoding:
    """How detections become slots.

    Attributes:
        bins: what a bin is. Finer bins mix fewer objects: an object that vanishes moves only the others in its bin.
        sort: by objectness, largest first (ties by class score), or by the centre, left to right (ties top to bottom).
        grid: a location bin is a cell of a grid x grid division of the image; a centre outside belongs to the nearest.
    """

    bins: Bins = "location+label"
    sort: Sort = "location"
    grid: int = 3

    def __post_init__(self) -> None:
        if self.bins not in get_args(Bins):
            raise InputError(f"bins must be one of {', '.join(get_args(Bins))}, got {self.bins!r}")
        if self.sort not in get_args(Sort):
            raise InputError(f"sort must be 'objectness' or 'location', got {self.sort!r}")
        if self.grid < 1:
            raise InputError(f"the grid of location bins needs at least 1 cell a side, got {self.grid}")


@dataclass(frozen=True, eq=False)
class Detections:
    """Detections of `count` images in one tensor.

    Attributes:
        values: shape (T, 7).
        image: index of the image that each row belongs to, int64, shape (T,).
    """

    values: Tensor
    image: Tensor
    count: int

    def above(self, objectness: float) -> "Detections":
        """Those with at least this objectness."""
        keep = self.values[:, OBJECTNESS] >= objectness
        return Detections(self.values[keep], self.image[keep], self.count)


def flatten(detections: Sequence[Tensor]) -> Detections:
    """A list of (N, 7), one for each image, as one tensor; refused if it is not what a detector returns."""
    check_detections(detections, len(detections))
    counts = torch.tensor([len(each) for each in detections], dtype=torch.int64)
    values = torch.cat([*detections]) if detections else torch.zeros(0, COLUMNS)
    image = torch.arange(len(detections)).repeat_interleave(counts).to(values.device)
    return Detections(values, image, len(detections))


def encode(detections: Detections, size: tuple[int, int], encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Slots of all images of `size` (height, width) side by side: values (count, S, 7), and the bin (S,) of each slot.

    A bin has as many slots as the fullest image fills: slots beyond are +inf in every image.
    """
    values, image = detections.values, detections.image
    code = _bin(values, size, encoding)
    bins, bin_index = code.unique(return_inverse=True)
    order = lexicographic([image, bin_index, *_keys(values, encoding)])
    group = (image * max(1, len(bins)) + bin_index)[order]
    # Place of a row within its run of equal (image, bin): its position less the first row's position.
    position = torch.arange(len(order), device=values.device)
    starts = torch.ones_like(group, dtype=torch.bool)
    starts[1:] = group[1:] != group[:-1]
    rank = position - torch.where(starts, position, 0).cummax(0).values
    capacity = torch.zeros_like(bins).scatter_reduce(0, bin_index[order], rank + 1, "amax")
    first = capacity.cumsum(0) - capacity
    slots = values.new_full((detections.count, int(capacity.sum()), COLUMNS), torch.inf)
    slots[image[order], first[bin_index[order]] + rank] = values[order]
    return slots, bins.repeat_interleave(capacity)


def decode(slots: Tensor) -> Tensor:
    """The detections (K, 7) among slots (S, 7): those that are not +inf."""
    return slots[torch.isfinite(slots).all(1)]


def _centre(values: Tensor) -> tuple[Tensor, Tensor]:
    return (values[:, 0] + values[:, 2]) / 2, (values[:, 1] + values[:, 3]) / 2


def _bin(values: Tensor, size: tuple[int, int], encoding: Encoding) -> Tensor:
    """Number of the bin of each detection, int64, shape (T,): label * grid^2 + cell."""
    code = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    if "label" in encoding.bins:
        code += values[:, LABEL].long() * encoding.grid**2
    if "location" in encoding.bins:
        column, row = (
            (centre * encoding.grid / extent).floor().long().clamp(0, encoding.grid - 1)
            for centre, extent in zip(_centre(values), (size[1], size[0]), strict=True)
        )
        code += row * encoding.grid + column
    return code


def _keys(values: Tensor, encoding: Encoding) -> list[Tensor]:
    """Keys to sort by inside a bin; all columns take part, so that the detector's own order does not matter."""
    place = [*_centre(values), *values[:, :4].unbind(1)]
    scores = [-values[:, OBJECTNESS], -values[:, SCORE]]
    keys = [*scores, *place] if encoding.sort == "objectness" else [*place, *scores]
    return [*keys, values[:, LABEL]]
