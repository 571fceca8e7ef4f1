"""Read files from outside with limits on size, depth and number of values; beyond a limit, raise ValueError.

Nothing here runs code from a file. The callers know what the file is for, and turn the ValueError into an error that
says so.
"""

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LARGEST = 256 * 2**20
"""Bytes of a text file: an audit of a million inputs has fewer."""
DEPTH = 32
"""Lists and tables inside each other. Our files need fewer than ten; Python's own limit is about a thousand."""
UNPACKED = 4
"""Bytes that a byte of an archive may stand for: torch does not compress, and tensors may share their values."""
SHOWN = 200
"""Characters of a value in a message."""


def read_text(path: str | Path, most: int = LARGEST) -> str:
    """Read a UTF-8 text file of at most `most` bytes."""
    with Path(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content.decode()


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse a JSON text.

    Args:
        text: refused if it is nested deeper than `DEPTH` or names a key twice in one table.
        finite: also refuse NaN and infinite numbers.

    >>> parse_json('{"a": [1, null]}')
    {'a': [1, None]}
    """
    value = without_recursion(lambda: json.loads(text, object_pairs_hook=_table))
    check_values(value, finite=finite)
    return value


def without_recursion(parse: Callable[[], Any]) -> Any:
    """Call `parse`; raise ValueError if the text is nested too deep for it."""
    try:
        return parse()
    except RecursionError:
        raise _too_deep() from None


def check_values(value: object, *, most: int | None = None, finite: bool = True) -> None:
    """Refuse values that JSON cannot hold, nesting deeper than `DEPTH`, and more than `most` values.

    A list that occurs in several places counts once for each, since writing it out would take that long.
    """
    level, seen = [value], 1
    for _ in range(DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                _check_keys(item)
                below.extend(item.values())
            elif isinstance(item, list | tuple):
                below.extend(item)
            elif isinstance(item, float) and finite and not math.isfinite(item):
                raise ValueError(f"it holds the number {item}; expected finite numbers")
            elif isinstance(item, int) and abs(item) >= 2**64:
                raise ValueError("it holds a whole number of more than 64 bits")
            elif item is not None and not isinstance(item, str | int | float):
                raise ValueError(f"it holds a {type(item).__name__}; expected texts, numbers, lists and tables")
            if most is not None and seen + len(below) > most:
                raise ValueError(f"it holds more than {most:,} values")
        level, seen = below, seen + len(below)
        if not level:
            return
    raise _too_deep()


def load_tensors(path: str | Path) -> Any:
    """Load the tensors and plain containers of a `torch.save` file on the CPU; no code in it runs.

    A packed archive is refused if it unpacks to more than `UNPACKED` times its size.
    """
    size = Path(path).stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
        if unpacked > UNPACKED * size:
            raise ValueError(f"its {size:,} bytes unpack to {unpacked:,}; save it again with torch.save")
    return torch.load(path, map_location="cpu", weights_only=True)


def shortened(value: object, most: int = SHOWN) -> str:
    """`repr` of a value, cut in the middle where it is long.

    >>> shortened("a" * 1000, 20)
    "'aaaaaaaa ... aaaaaaaa'"
    """
    return shortened_text(repr(value), most)


def shortened_text(text: str, most: int = SHOWN) -> str:
    """Cut a long text in the middle."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 1]} ... {text[1 - half :]}"


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"it has the key {shortened(name)} twice")
        table[name] = value
    return table


def _check_keys(table: dict[Any, Any]) -> None:
    for key in table:
        if not isinstance(key, str):
            raise ValueError(f"it has a key that is a {type(key).__name__}; expected a text")


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {DEPTH} levels")
