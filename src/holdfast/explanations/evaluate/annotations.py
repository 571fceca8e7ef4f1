"""What a person says is important: boxes around the object, from a tensor, a CSV file or a COCO file, as masks."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import InputError, StorageError
from holdfast.utils.limits import without_recursion

COLUMNS = ("input", "x0", "y0", "x1", "y1")
SIZE = ("width", "height")


@dataclass(frozen=True, eq=False)
class BoxTable:
    """Boxes of some inputs; an input may have none, one or several.

    Attributes:
        index: (M,) int64, the input that each box belongs to.
        boxes: (M, 4) float64, x0, y0, x1, y1 in pixels, the right and lower ends excluded.
        sizes: (M, 2) float64, width and height of the image that the pixels count in; NaN where that is the input.
    """

    index: Tensor
    boxes: Tensor
    sizes: Tensor

    def select(self, index: Tensor) -> "BoxTable":
        """The boxes of the inputs at these positions, ascending (n,), which become inputs 0 to n - 1."""
        kept = torch.isin(self.index, index)
        return BoxTable(torch.searchsorted(index, self.index[kept]), self.boxes[kept], self.sizes[kept])

    def cropped(self, resize: int | None, crop: int | None) -> "BoxTable":
        """The boxes in the pixels of images that were resized, then cropped around their centre.

        As image libraries do it: the shorter side becomes `resize`, and a square of side `crop` is cut out of the
        middle. What a box loses at the edge of the crop is cut off by `box_masks`, which also sets aside what lies
        outside. The sizes of the images must be known: a COCO file has them, a CSV file may (width, height).

        Args:
            resize: None to leave the size as it is.  crop: None to leave out the crop.
        """
        if bool(torch.isnan(self.sizes).any()):
            raise InputError(
                "boxes can follow a crop only where the size of the image is known: give a COCO file, or columns width "
                "and height in the CSV file"
            )
        for name, value in (("resize", resize), ("crop", crop)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1 pixel, got {value}")
        scale = 1.0 if resize is None else resize / self.sizes.amin(1, keepdim=True)
        # The longer side is rounded down, and the two axes are scaled to what that gives.
        sizes = torch.floor(self.sizes * scale + 1e-6)
        boxes = self.boxes * (sizes / self.sizes).repeat(1, 2)
        if crop is None:
            return BoxTable(self.index, boxes, sizes)
        corner = torch.round((sizes - crop) / 2)
        return BoxTable(self.index, boxes - corner.repeat(1, 2), torch.full_like(sizes, float(crop)))


@dataclass(frozen=True, eq=False)
class Masks:
    """The pixels inside the boxes of each input.

    Attributes:
        inside: (N, H, W) bool; the union where there are several boxes.
        problem: why an input cannot be scored, for each input; empty where it can.
    """

    inside: Tensor
    problem: tuple[str, ...]


def box_table(boxes: Tensor) -> BoxTable:
    """One box for each input, from a tensor (N, 4) such as `data.test.boxes`."""
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise InputError(f"boxes must have shape (N, 4): x0, y0, x1, y1; got {tuple(boxes.shape)}")
    table = boxes.detach().double().cpu()
    return BoxTable(torch.arange(len(table)), table, torch.full((len(table), 2), math.nan, dtype=torch.float64))


def read_boxes(path: Path) -> BoxTable:
    """Boxes from a file of yours.

    .csv: the columns input, x0, y0, x1, y1, one row for each box; `input` is the position in the data, from 0; columns
    width and height, if there are any, hold the size of the image that the pixels count in. .json: COCO; the images, in
    the order of their list, are the inputs. Where sizes are known they scale the boxes to the inputs.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read the boxes '{path}': {error}") from error
    rows = _coco(text, path) if str(path).endswith(".json") else _csv(text, path)
    numbers = torch.tensor(rows, dtype=torch.float64).view(-1, 7)
    return BoxTable(numbers[:, 0].long(), numbers[:, 1:5], numbers[:, 5:])


def _csv(text: str, path: Path) -> list[list[float]]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"'{path}' has no column '{missing[0]}'; expected the columns {', '.join(COLUMNS)}")
    rows = []
    for line, row in enumerate(reader, 2):
        try:
            size = [float(row[name]) if name in (reader.fieldnames or ()) else math.nan for name in SIZE]
            rows.append([float(int(row["input"])), *(float(row[name]) for name in COLUMNS[1:]), *size])
        except (TypeError, ValueError) as error:
            raise InputError(
                f"line {line} of '{path}': expected numbers for {', '.join(COLUMNS)}, got {row}"
            ) from error
        if rows[-1][0] < 0:
            raise InputError(f"line {line} of '{path}': the input must be >= 0, got {row['input']}")
    return rows


def _coco(text: str, path: Path) -> list[list[float]]:
    try:
        content: dict[str, Any] = without_recursion(lambda: json.loads(text))
        images = {image["id"]: i for i, image in enumerate(content["images"])}
        sizes = [(float(image["width"]), float(image["height"])) for image in content["images"]]
        rows = []
        for note in content["annotations"]:
            x0, y0, width, height = (float(number) for number in note["bbox"])
            position = images[note["image_id"]]
            rows.append([float(position), x0, y0, x0 + width, y0 + height, *sizes[position]])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"'{path}' is not a COCO file with images (id, width, height) and annotations (image_id, bbox): {error!r}"
        ) from error
    return rows


def box_masks(table: BoxTable, count: int, height: int, width: int, *, max_area: float = 1.0) -> Masks:
    """Masks of `count` inputs of height x width pixels; a pixel is inside if its centre is.

    Boxes that reach over the edge are cut off there. An input is set aside, with the reason, if it has no box, if one
    of its boxes is empty, not finite, or outside the image, or if its boxes cover `max_area` of the image or more: a
    box around everything says nothing.
    """
    problem = ["no box"] * count
    inside = torch.zeros(count, height, width, dtype=torch.bool)
    across, down = torch.arange(width) + 0.5, torch.arange(height) + 0.5
    for i, box, size in zip(table.index.tolist(), table.boxes.tolist(), table.sizes.tolist(), strict=True):
        if i >= count:
            continue
        scale = [1.0 if math.isnan(of) else side / of for of, side in zip(size, (width, height), strict=True)]
        x0, y0, x1, y1 = (value * scale[k % 2] for k, value in enumerate(box))
        reason = _reason((x0, y0, x1, y1), width, height)
        if problem[i] in ("", "no box") or reason:
            problem[i] = reason
        if not reason:
            inside[i] |= ((down >= y0) & (down < y1))[:, None] & ((across >= x0) & (across < x1))
    for i, share in enumerate(inside.double().mean((1, 2)).tolist()):
        if not problem[i] and share == 0:
            problem[i] = "the box holds no pixel"
        elif not problem[i] and share >= max_area and share > 0:
            problem[i] = f"the box covers {share:.0%} of the image"
    return Masks(inside, tuple(problem))


def _reason(box: Sequence[float], width: int, height: int) -> str:
    """What is wrong with a box; empty if nothing is."""
    x0, y0, x1, y1 = box
    if not all(map(math.isfinite, box)):
        return "the box is not finite"
    if x1 <= x0 or y1 <= y0:
        return f"the box is empty: {x0:g}, {y0:g}, {x1:g}, {y1:g}"
    if x1 <= 0 or y1 <= 0 or x0 >= width or y0 >= height:
        return f"the box {x0:g}, {y0:g}, {x1:g}, {y1:g} lies outside the image of {width} x {height}"
    return ""
