"""Values of the user's own: one profile a row, bidder after bidder, in a CSV file."""

import csv
from pathlib import Path

import torch
from torch import Tensor

from holdfast.errors import InputError, StorageError


def read_values(path: str | Path, bidders: int, items: int) -> Tensor:
    """Profiles (N, n, k) from rows of n k numbers: the items of bidder 1, then of bidder 2, ...; a heading is skipped.

    Raises:
        StorageError: the file cannot be read.
        InputError: a row has another length, or something that is no number; the message names the line.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            lines = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StorageError(f"cannot read the values in '{path}': {error}") from error
    if lines and not _is_number(lines[0][1][0]):
        lines = lines[1:]
    if not lines:
        raise InputError(f"'{path}' holds no values")
    profiles = []
    for number, row in lines:
        if len(row) != bidders * items:
            raise InputError(
                f"'{path}', line {number}: expected {bidders * items} values ({bidders} bidders, {items} items), "
                f"got {len(row)}"
            )
        wrong = [cell for cell in row if not _is_number(cell)]
        if wrong:
            raise InputError(f"'{path}', line {number}: '{wrong[0]}' is no number")
        profiles.append([float(cell) for cell in row])
    return torch.tensor(profiles).view(-1, bidders, items)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
