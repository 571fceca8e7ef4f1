"""A CSV file that lists images and their labels."""

import csv
from pathlib import Path

import numpy as np

from holdfast.data.cache import reading
from holdfast.data.dataset import Arrays, Dataset, make_split
from holdfast.data.image_folder import read_images
from holdfast.errors import InputError

_FILES, _LABELS = ("file", "path", "image", "filename"), ("label", "class", "target")


def read_image_list(path: Path, *, name: str) -> Dataset:
    """Images named in a CSV file with the columns `file` and `label`; the data have no splits and are kept whole.

    Files are relative to the folder of the CSV file. Labels are whole numbers from 0, or names, which get their numbers
    in the order of the alphabet.
    """
    rows = _read_rows(path)
    files = [path.parent / file for file, _ in rows]
    missing = next((i for i, file in enumerate(files) if not file.is_file()), None)
    if missing is not None:
        raise InputError(f"'{path}', line {missing + 2}: there is no image '{rows[missing][0]}'")
    labels, classes = _numbered([label for _, label in rows], path)
    split = make_split(Arrays(read_images(files), labels, f"'{path}'"), len(classes))
    return Dataset(name, split[:0], split, classes, whole=split)


def _read_rows(path: Path) -> list[tuple[str, str]]:
    with reading(path, csv.Error), path.open(newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        known = table.fieldnames or []
        columns = [next((c for c in choices if c in known), None) for choices in (_FILES, _LABELS)]
        if None in columns:
            raise InputError(f"'{path}' must have the columns 'file' and 'label', found {', '.join(known) or 'none'}")
        rows = [(row[columns[0]] or "", row[columns[1]] or "") for row in table]
    if not rows:
        raise InputError(f"'{path}' lists no images")
    empty = next((i for i, (file_name, label) in enumerate(rows) if not file_name or not label.strip()), None)
    if empty is not None:
        raise InputError(f"'{path}', line {empty + 2}: a file and a label are needed, got {rows[empty]}")
    return rows


def _numbered(labels: list[str], path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as class indices, and the names of the classes."""
    if all(label.strip().isdecimal() for label in labels):
        numbers = np.array([int(label) for label in labels])
        return numbers, tuple(str(i) for i in range(int(numbers.max()) + 1))
    if any(label.strip().lstrip("-").isdecimal() for label in labels):
        raise InputError(f"'{path}': labels must all be whole numbers from 0, or all be names")
    names = sorted({label.strip() for label in labels})
    return np.array([names.index(label.strip()) for label in labels]), tuple(names)
