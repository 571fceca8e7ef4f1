"""Boxes and detections in COCO's JSON format, read with checks and written; AP by pycocotools where it is installed.

COCO writes a box as x, y, width, height, and gives images and categories numbers of its own; here labels are positions
in the list of categories, ordered by id.
"""

import contextlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.apps.detection.boxes import COLUMNS, LABEL, OBJECTNESS, SCORE, check_detections
from holdfast.errors import InputError, StorageError, UnsupportedError
from holdfast.utils.limits import without_recursion


@dataclass(frozen=True, eq=False)
class CocoTruth:
    """True boxes of a data set.

    Attributes:
        images: id and file name of each image.  sizes: height and width of each.
        truth: boxes (K, 4) as x1, y1, x2, y2 and labels (K,) of each image; crowds are left out.
        categories: id and name of each label.
    """

    images: tuple[tuple[int, str], ...]
    sizes: tuple[tuple[int, int], ...]
    truth: list[tuple[Tensor, Tensor]]
    categories: tuple[tuple[int, str], ...]


def read_coco(path: str | os.PathLike[str]) -> CocoTruth:
    """Images, true boxes and categories of an annotation file (instances)."""
    content = _read(path)
    if not isinstance(content, dict):
        raise InputError(f"'{path}' must hold a JSON object with images, annotations and categories")
    images, annotations, categories = (_list(content, key, path) for key in ("images", "annotations", "categories"))
    categories = sorted(categories, key=lambda each: _whole(each, "id", path))
    label = {_whole(each, "id", path): i for i, each in enumerate(categories)}
    position = {_whole(each, "id", path): i for i, each in enumerate(images)}
    if len(label) < len(categories) or len(position) < len(images):
        raise InputError(f"'{path}' has two images or two categories with the same id")
    boxes: list[list[list[float]]] = [[] for _ in images]
    labels: list[list[int]] = [[] for _ in images]
    for number, each in enumerate(annotations):
        where = f"'{path}', annotation {number}"
        box = _corners(each.get("bbox"), where)
        image, category = _whole(each, "image_id", where), _whole(each, "category_id", where)
        if image not in position or category not in label:
            raise InputError(f"{where}: image {image} or category {category} is not listed in the file")
        if each.get("iscrowd", 0) == 0:
            boxes[position[image]].append(box)
            labels[position[image]].append(label[category])
    return CocoTruth(
        tuple((_whole(each, "id", path), str(each.get("file_name", ""))) for each in images),
        tuple((_whole(each, "height", path), _whole(each, "width", path)) for each in images),
        [(torch.tensor(b).view(-1, 4), torch.tensor(y, dtype=torch.int64)) for b, y in zip(boxes, labels, strict=True)],
        tuple((_whole(each, "id", path), str(each.get("name", ""))) for each in categories),
    )


def write_coco(path: str | os.PathLike[str], data: CocoTruth) -> None:
    """The reverse of `read_coco`."""
    annotations: list[dict[str, Any]] = []
    for (image, _), (boxes, labels) in zip(data.images, data.truth, strict=True):
        for box, label in zip(boxes.tolist(), labels.tolist(), strict=True):
            x1, y1, x2, y2 = box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": data.categories[label][0],
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                    "iscrowd": 0,
                }
            )
    images = [
        {"id": number, "file_name": name, "height": height, "width": width}
        for (number, name), (height, width) in zip(data.images, data.sizes, strict=True)
    ]
    categories = [{"id": number, "name": name} for number, name in data.categories]
    _write(path, {"images": images, "annotations": annotations, "categories": categories})


def read_coco_detections(path: str | os.PathLike[str], data: CocoTruth) -> list[Tensor]:
    """Detections (N, 7) for each image of `data`, from a result file; its one score becomes the objectness."""
    content = _read(path)
    if not isinstance(content, list):
        raise InputError(f"'{path}' must hold a JSON list of detections")
    position = {number: i for i, (number, _) in enumerate(data.images)}
    label = {number: i for i, (number, _) in enumerate(data.categories)}
    rows: list[list[list[float]]] = [[] for _ in data.images]
    for number, each in enumerate(content):
        where = f"'{path}', detection {number}"
        if not isinstance(each, dict):
            raise InputError(f"{where} must be a JSON object, got {type(each).__name__}")
        image, category = _whole(each, "image_id", where), _whole(each, "category_id", where)
        if image not in position or category not in label:
            raise InputError(f"{where}: image {image} or category {category} is not among the true boxes' file")
        if not isinstance(each.get("score"), int | float):
            raise InputError(f"{where}: 'score' must be a number, got {each.get('score')!r}")
        rows[position[image]].append([*_corners(each.get("bbox"), where), float(each["score"]), 1.0, label[category]])
    found = [torch.tensor(each).view(-1, COLUMNS) for each in rows]
    check_detections(found, len(found))
    return found


def write_coco_detections(path: str | os.PathLike[str], detections: Sequence[Tensor], data: CocoTruth) -> None:
    """Detections (N, 7) of each image of `data` as a result file; the score is objectness times class score."""
    check_detections(detections, len(data.images))
    rows = []
    for (image, _), found in zip(data.images, detections, strict=True):
        for each in found.tolist():
            x1, y1, x2, y2 = each[:4]
            if each[LABEL] >= len(data.categories):
                raise InputError(
                    f"label {each[LABEL]:g} of image {image} has no category; there are {len(data.categories)}"
                )
            score, category = each[OBJECTNESS] * each[SCORE], data.categories[int(each[LABEL])][0]
            rows.append(
                {"image_id": image, "category_id": category, "bbox": [x1, y1, x2 - x1, y2 - y1], "score": score}
            )
    _write(path, rows)


def coco_ap(truth: str | os.PathLike[str], detections: str | os.PathLike[str]) -> dict[str, float]:
    """COCO's own figures for a result file: "AP" (over overlaps of 0.5 to 0.95), "AP50" and "AP75", in [0, 1]."""
    try:
        from pycocotools.coco import COCO  # type: ignore[import-untyped, unused-ignore]
        from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise UnsupportedError("COCO's AP needs pycocotools: pip install pycocotools") from error
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its progress there
        reference = COCO(os.fspath(truth))
        run = COCOeval(reference, reference.loadRes(os.fspath(detections)), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return {name: float(value) for name, value in zip(("AP", "AP50", "AP75"), run.stats[:3], strict=True)}


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
        return without_recursion(lambda: json.loads(text))
    except OSError as error:
        raise StorageError(f"cannot read '{os.fspath(path)}': {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"'{os.fspath(path)}' is not JSON: {error}") from error


def _write(path: str | os.PathLike[str], content: object) -> None:
    try:
        Path(path).write_text(json.dumps(content, sort_keys=True), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write '{os.fspath(path)}': {error.strerror or error}") from error


def _list(content: dict[str, Any], key: str, path: object) -> list[dict[str, Any]]:
    value = content.get(key)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InputError(f"'{path}': '{key}' must be a list of JSON objects")
    return value


def _whole(entry: Mapping[str, Any], key: str, where: object) -> int:
    value = entry.get(key)
    if type(value) is not int:
        raise InputError(f"{where}: '{key}' must be a whole number, got {value!r}")
    return value


def _corners(bbox: object, where: str) -> list[float]:
    """x1, y1, x2, y2 of a box given as x, y, width, height."""
    numbers = isinstance(bbox, list) and len(bbox) == 4 and all(type(v) in (int, float) for v in bbox)
    if not numbers or not (0 <= bbox[2] < float("inf") and 0 <= bbox[3] < float("inf")):  # type: ignore[index]
        raise InputError(f"{where}: 'bbox' must be [x, y, width, height] with width and height >= 0, got {bbox!r}")
    x, y, width, height = map(float, bbox)  # type: ignore[call-overload]
    return [x, y, x + width, y + height]
