"""The inputs of an audit, one by one, as the data that the report's gallery filters, sorts and shows."""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from markupsafe import Markup

from holdfast.audits.bracket import Bracket, Record
from holdfast.audits.result import Audit
from holdfast.audits.rows import Example
from holdfast.audits.words import denominator
from holdfast.explanations.core.pictures import signed_map
from holdfast.utils.png import data_uri, is_picture

PICTURE_BYTES = 4_000_000
"""Of all pictures together, as they stand in the page."""
LARGEST_SIDE = 96
"""Pixels of a picture; larger ones are averaged down to it."""
STATES = ("misclassified", "broken", "undecided", "certified")

Image = npt.NDArray[np.floating]
Key = tuple[int, int]
"""Number of the bracket and position of the input."""
Pictures = dict[str, str]


def state(record: Record, budget: float) -> str:
    """What is known of an input at the largest budget: one of STATES."""
    if record.certified is None:
        return "misclassified"
    if record.broken is not None:
        return "broken"
    return "certified" if record.certified >= budget else "undecided"


def class_namer(audit: Audit) -> Callable[[int | None], str]:
    """Function from a class to its name; to its number where it has none, to nothing where it is None."""

    def name(number: int | None) -> str:
        if number is None:
            return ""
        return audit.classes[number] if number < len(audit.classes) else f"class {number}"

    return name


def gallery(audit: Audit, *, picture_bytes: int = PICTURE_BYTES) -> dict[str, Any]:
    """All inputs as values for JSON, with as many pictures as fit: the smallest examples first.

    Keys: "classes" (name by number), "columns" (names of the groups), "groups" (for each input, a text for each
    column), "originals" (pictures by position, which the brackets share) and "brackets": for each, "threat", "budget",
    "parts" (denominator that sizes are written with; 0 if they are not), "left" (how many examples are shown without
    pictures) and "rows", an object for each input.
    """
    originals, found, left = _pictures(audit, picture_bytes)
    name = class_namer(audit)
    numbers = {n for b in audit.brackets for r in b.records for n in (r.label, r.prediction, r.prediction_adv)}
    return {
        "classes": {number: name(number) for number in sorted(n for n in numbers if n is not None)},
        "columns": list(audit.groups),
        "groups": [list(values) for values in zip(*audit.groups.values(), strict=True)],
        "originals": originals,
        "brackets": [
            {
                "threat": bracket.threat,
                "budget": bracket.budgets[-1],
                "parts": int(denominator(bracket.threat) or 0),
                "left": left[k],
                "rows": [_row(r, bracket, found.get((k, r.position), {})) for r in bracket.records],
            }
            for k, bracket in enumerate(audit.brackets)
        ],
    }


def island(values: dict[str, Any]) -> Markup:
    """JSON that can stand between script tags: nothing in it ends them or starts a comment."""
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", r"\u003c").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029"))


def _row(record: Record, bracket: Bracket, pictures: Pictures) -> dict[str, Any]:
    values: dict[str, Any] = {
        "at": record.position,
        "label": record.label,
        "is": record.prediction,
        "state": state(record, bracket.budgets[-1]),
        "low": None if record.certified is None else min(record.certified, sys.float_info.max),  # JSON has no infinity
        "proof": record.certified_by,
        "high": record.broken,
        "attack": record.broken_by,
        "becomes": record.prediction_adv,
        "gap": record.gap,
    }
    return {key: value for key, value in values.items() if value not in (None, "")} | pictures


def _pictures(audit: Audit, room: int) -> tuple[dict[int, str], dict[Key, Pictures], list[int]]:
    """Originals by position; for each bracket and position the other pictures; how many examples did not fit.

    Adversarial examples come first, then their attributions, then the inputs that hold. The brackets take turns.
    """
    originals: dict[int, str] = {}
    found: dict[Key, Pictures] = {}
    left = [0] * len(audit.brackets)
    for part, wanted in _PARTS:
        full = False
        for k, example in _in_turn(audit):
            key = k, example.position
            if not wanted(example) or (part is _why and key not in found):
                continue
            if not full:
                pictures = part(example, audit.brackets[k])
                new = example.position not in originals
                original = {example.position: _original(example, audit.brackets[k])} if new else {}
                size = sum(map(len, (*pictures.values(), *original.values())))
                full = size > room
            if full:  # the rest is not even tried: drawing pictures is what takes the time here
                left[k] += part is not _why
                continue
            room -= size
            originals |= original
            found.setdefault(key, {}).update(pictures)
    return originals, found, left


def _in_turn(audit: Audit) -> Iterator[tuple[int, Example]]:
    """The examples that are images: the first one of each bracket, then the second one of each, and so on."""
    for rank in zip_longest(*(bracket.examples for bracket in audit.brackets)):
        for k, example in enumerate(rank):
            if example is not None and is_picture(example.x.shape):
                yield k, example


def _original(example: Example, bracket: Bracket) -> str:
    return _picture(example.x, *bracket.valid_range)


def _changed(example: Example, bracket: Bracket) -> Pictures:
    """The adversarial example and the difference: grey is no change, the largest one is black or white."""
    assert example.x_adv is not None
    low, high = bracket.valid_range
    change = example.x_adv.astype(np.float64) - example.x
    scale = float(np.abs(change).max()) or 1.0
    return {
        "adv": _picture(example.x_adv, low, high),
        "diff": _picture(change, -scale, scale),
        "times": f"{(high - low) / (2 * scale):.3g}",
    }


def _why(example: Example, _: Bracket) -> Pictures:
    assert example.attribution is not None
    return {"why": _picture(signed_map(torch.tensor(_shrunk(example.attribution))), 0.0, 1.0)}


def _alone(*_: object) -> Pictures:
    return {}


# What is drawn, the most important first: what comes later takes what is left. An input that holds has itself only.
_PARTS: tuple[tuple[Callable[[Example, Bracket], Pictures], Callable[[Example], bool]], ...] = (
    (_changed, lambda example: example.x_adv is not None),
    (_why, lambda example: example.attribution is not None),
    (_alone, lambda example: example.x_adv is None),
)


def _picture(image: Image, low: float, high: float) -> str:
    return data_uri(_shrunk(image), low=low, high=high).partition(",")[2]


def _shrunk(image: Image) -> Image:
    """An image (C, H, W) with no side above LARGEST_SIDE: means over squares; what is left at the edges is cut off."""
    channels, height, width = image.shape
    factor = -(-max(height, width) // LARGEST_SIDE)
    if factor == 1 or min(height, width) < factor:
        return image
    rows, columns = height // factor, width // factor
    squares = image[:, : rows * factor, : columns * factor].reshape(channels, rows, factor, columns, factor)
    means: Image = squares.mean((2, 4))
    return means
