"""A folder of class folders with PNG or JPEG images, and a CSV file of bounding boxes if there is one."""

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.data.cache import reading
from holdfast.data.dataset import Arrays, Dataset, make_split, split_validation
from holdfast.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from PIL import Image

_SUFFIXES = (".png", ".jpg", ".jpeg")
_COLUMNS = ("file", "x0", "y0", "x1", "y1")
_Boxes = dict[str, tuple[float, ...]]


def read_folder(
    folder: Path, *, name: str, boxes: Path | None = None, test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    """Images in train/CLASS and test/CLASS, or only in CLASS.

    Without train and test, `test_fraction` of each class is held out for testing, chosen by `seed`. All images must
    have the same size. They are read as grey (one channel) if every one of them is, else as RGB.

    Args:
        folder: the folder.
        name: name of the data set.
        boxes: CSV file with the columns file, x0, y0, x1, y1 (pixels); `file` is relative to the folder, with slashes.
            A split of which no image is listed has no boxes; one that is listed in part is an error.
        test_fraction: share of each class to hold out, between 0 and 1.
        seed: which images are held out.
    """
    table = _read_boxes(boxes) if boxes is not None else {}
    has_parts = (folder / "train").is_dir() and (folder / "test").is_dir()
    if not has_parts and ((folder / "train").is_dir() or (folder / "test").is_dir()):
        raise InputError(f"'{folder}' has only one of the folders 'train' and 'test'; it needs both or neither")
    roots = [folder / "train", folder / "test"] if has_parts else [folder]
    classes = _class_names(roots[0])
    files = [_list_images(root, classes) for root in roots]
    pixels = read_images([file for part in files for file, _ in part])
    known = {file.relative_to(folder).as_posix() for part in files for file, _ in part}
    unknown = next((file for file in table if file not in known), None)
    if unknown is not None:
        raise InputError(f"'{boxes}' lists '{unknown}', but '{folder}' has no such image")

    splits = []
    for root, part in zip(roots, files, strict=True):
        own, pixels = pixels[: len(part)], pixels[len(part) :]
        labels = np.array([label for _, label in part], dtype=np.int64)
        part_boxes = _boxes_of([file.relative_to(folder).as_posix() for file, _ in part], table, boxes)
        splits.append(make_split(Arrays(own, labels, f"'{root}'", part_boxes), len(classes)))
    train, test = splits if has_parts else split_validation(splits[0], test_fraction, seed)
    return Dataset(name, train, test, tuple(classes), None if has_parts else splits[0])


def _class_names(root: Path) -> list[str]:
    with reading(root):
        names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise InputError(
            f"'{root}' has no class folders. A folder of images needs one folder per class; see the documentation of "
            "the formats for idx, CIFAR, SVHN and .npz files."
        )
    return names


def _list_images(root: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """(file, class index), sorted by class and then by name."""
    extra = sorted(set(_class_names(root)) - set(classes))
    if extra:
        raise InputError(
            f"'{root}' has the class '{extra[0]}', which the training folder has not: {', '.join(classes)}"
        )
    listed = []
    for label, name in enumerate(classes):
        found = sorted(file for file in (root / name).glob("*") if file.suffix.lower() in _SUFFIXES)
        if not found:
            raise InputError(f"'{root / name}' holds no images ({', '.join(_SUFFIXES)})")
        listed += [(file, label) for file in found]
    return listed


def read_images(files: list[Path]) -> npt.NDArray[np.uint8]:
    """Images of one size, uint8, shape (N, C, H, W)."""
    images = [_read_image(file) for file in files]
    for file, image in zip(files, images, strict=True):
        if image.shape[:2] != images[0].shape[:2]:
            (height, width), (height_0, width_0) = image.shape[:2], images[0].shape[:2]
            raise InputError(
                f"'{file}' is {width} x {height} pixels but '{files[0]}' is {width_0} x {height_0}; "
                "all images must have the same size: resize or crop them first"
            )
    channels = max(image.shape[2] for image in images)
    return np.stack([np.broadcast_to(image, (*image.shape[:2], channels)).transpose(2, 0, 1) for image in images])


def _read_image(file: Path) -> npt.NDArray[Any]:
    """One image, uint8, shape (H, W, 1) or (H, W, 3)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedError(
            "reading PNG and JPEG files needs Pillow. Install it with: pip install 'holdfast[images]'"
        ) from error
    with reading(file, SyntaxError, Image.DecompressionBombError), Image.open(file) as image:
        array = np.asarray(image.convert(_target_mode(image, file)))
    return array[:, :, None] if array.ndim == 2 else array


def _target_mode(image: "Image.Image", file: Path) -> str:
    """Grey or RGB; refuse what cannot be converted without loss of meaning."""
    if image.mode in ("1", "L"):
        return "L"
    if image.mode in ("RGB", "YCbCr", "CMYK") or (image.mode == "P" and "transparency" not in image.info):
        return "RGB"
    raise InputError(
        f"'{file}' has the mode {image.mode} (transparency, or more than 8 bits per channel); "
        "convert it to plain 8-bit grey or RGB first"
    )


def _read_boxes(path: Path) -> _Boxes:
    table: _Boxes = {}
    with reading(path, csv.Error), path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        missing = [column for column in _COLUMNS if column not in (rows.fieldnames or ())]
        if missing:
            raise InputError(f"'{path}' has no column '{missing[0]}'; its first line must name {', '.join(_COLUMNS)}")
        for row in rows:
            try:
                box = tuple(float(row[column]) for column in _COLUMNS[1:])
            except (TypeError, ValueError):
                box = (math.nan,)
            if not all(math.isfinite(value) for value in box):
                raise InputError(f"'{path}', line {rows.line_num}: x0, y0, x1, y1 must be numbers")
            if row["file"] in table:
                raise InputError(f"'{path}', line {rows.line_num}: '{row['file']}' is listed twice; give one box each")
            table[row["file"]] = box
    return table


def _boxes_of(files: list[str], table: _Boxes, path: Path | None) -> npt.NDArray[np.float32] | None:
    missing = [file for file in files if file not in table]
    if len(missing) == len(files):
        return None
    if missing:
        raise InputError(f"'{path}' has no box for '{missing[0]}' but has some for other images beside it; add it")
    return np.array([table[file] for file in files], dtype=np.float32)
