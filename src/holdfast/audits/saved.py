"""Save an audit in a folder and read it back."""

from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from holdfast.attacks.core.indicators import Indicator
from holdfast.audits.bracket import Bracket, Record
from holdfast.audits.report.card import badge, model_card, to_csv
from holdfast.audits.result import FIELDS, JSON_VERSION, Audit
from holdfast.audits.rows import Example, Ran
from holdfast.errors import StorageError
from holdfast.utils.files import write_text
from holdfast.utils.limits import parse_json, read_text, shortened
from holdfast.utils.resume import GO_ON, load_arrays, reading, save_arrays

REPORT, RESULT, EXAMPLES, PROGRESS = "report.html", "audit.json", "examples-{}.npz", "progress.json"
TEXTS = {"results.csv": to_csv, "badge.svg": badge, "model-card.md": model_card}
FILES = (RESULT, REPORT, PROGRESS, *TEXTS, EXAMPLES.format("*"))
"""Patterns of the names of all files that an audit writes beside its store."""
T = TypeVar("T")


def save_audit(audit: Audit, folder: Path) -> Path:
    """Write the report and the results into `folder`, see docs/audit.md; return the path of the report."""
    texts = {
        RESULT: audit.to_json(),
        **{name: write(audit) for name, write in TEXTS.items()},
        REPORT: audit.to_html(),
    }
    for number, bracket in enumerate(audit.brackets):
        save_arrays(folder / EXAMPLES.format(number), _arrays(bracket))
    for name, text in texts.items():
        write_text(folder / name, text, way_out=GO_ON)
    return folder / REPORT


def _arrays(bracket: Bracket) -> dict[str, Any]:
    """The pictures, each array under a letter and the position of its input."""
    arrays: dict[str, Any] = {}
    for example in bracket.examples:
        parts = (("x", example.x), ("adv", example.x_adv), ("why", example.attribution))
        arrays |= {f"{key}_{example.position}": values for key, values in parts if values is not None}
    return arrays


def load_audit(folder: str | Path) -> Audit:
    """Read an audit back from the folder that `Audit.save` or `audit(out=...)` wrote."""
    path = Path(folder) / RESULT
    try:
        body = parse_json(read_text(path))
    except FileNotFoundError as error:
        raise StorageError(f"there is no finished audit in '{folder}': '{path}' is missing") from error
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read '{path}': {error}; run the audit again with the same folder") from error
    if not isinstance(body, dict) or body.get("schema_version") != JSON_VERSION:
        version = body.get("schema_version") if isinstance(body, dict) else None
        raise StorageError(
            f"'{path}' has schema version {version}, this Holdfast reads {JSON_VERSION}; run the audit again"
        )
    try:
        values: dict[str, Any] = {key: ({"total": 0, "drawn": ""} | body)[key] for key in FIELDS}
        values["classes"] = _texts(body["classes"])
        values["groups"] = {name: _texts(column) for name, column in body["groups"].items()}
        brackets = tuple(
            _bracket(part, Path(folder) / EXAMPLES.format(number)) for number, part in enumerate(body["brackets"])
        )
        _check_whole(values, brackets)
        if "drawn" not in body:  # version 0.1.0 took the first inputs and did not say so
            values["drawn"] = f"the first {brackets[0].inputs:,}"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StorageError(f"'{path}' is not a complete audit: {error}; run the audit again") from error
    return Audit(**values, brackets=brackets)


def _bracket(body: dict[str, Any], examples: Path) -> Bracket:
    texts = {key: _texts(body[key]) for key in ("threats", "skipped")}
    numbers = {key: tuple(_typed(value, float, key) for value in body[key]) for key in ("budgets", "valid_range")}
    low, high = numbers["valid_range"]
    growing = all(a < b for a, b in pairwise((0.0, *numbers["budgets"])))
    if not (0 < len(texts["threats"]) == len(numbers["budgets"]) and growing and low < high):
        raise ValueError("a bracket has not as many threats as growing budgets, or an empty range of inputs")
    return Bracket(
        threat=_typed(body["threat"], str, "threat"),
        threats=texts["threats"],
        budgets=numbers["budgets"],
        valid_range=(low, high),
        seconds={step: _typed(seconds, float, "seconds") for step, seconds in body["seconds"].items()},
        skipped=texts["skipped"],
        proved=_typed(body["proved"], bool, "proved"),
        records=tuple(_row(Record, record) for record in body["records"]),
        trust=tuple(_row(Indicator, indicator) for indicator in body["trust"]),
        examples=_load_examples(examples),
        steps=tuple(_row(Ran, step) for step in body.get("steps", ())),
        reach=None if body.get("reach") is None else _typed(body["reach"], float, "reach"),
    )


def _check_whole(values: dict[str, Any], brackets: tuple[Bracket, ...]) -> None:
    """Refuse what would fail when it is shown: no brackets, brackets of other inputs, tables that are none."""
    if not brackets:
        raise ValueError("it has no bracket")
    if not all(0 < bracket.inputs == brackets[0].inputs for bracket in brackets):
        raise ValueError("its brackets are not all of as many inputs, or of none")
    for name, column in values["groups"].items():
        if len(column) != brackets[0].inputs:
            raise ValueError(f"the group column {shortened(name)} has not one value for each input")
    for key in ("name", "data", "created", "drawn"):
        _typed(values[key], str, key)
    _typed(values["total"], int, "total")
    for key in ("settings", "versions", "hashes"):
        _typed(values[key], dict, key)
    for step in values["settings"].get("steps", []):
        _typed(step["stage"], str, "stage"), _typed(step["method"], str, "method")
    _typed(values["settings"].get("alpha", 0.0), float, "alpha")


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(_typed(value, str, "a list of texts") for value in _typed(values, list, "a list of texts"))


def _row(kind: type[T], values: dict[str, Any]) -> T:
    """An instance of a dataclass of plain values, each of the type that the class says."""
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in values or field.default is MISSING:  # an earlier version did not write all of them
            _typed(values[field.name], field.type, field.name)
    return kind(**values)


def _typed(value: Any, kind: Any, name: str) -> Any:
    """The value, if it is of that kind; JSON writes 1.0 and 1 alike, and knows that true is no number."""
    wanted = kind | int if isinstance(0.0, kind) else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"'{name}' is {shortened(value)}")
    return value


def _load_examples(path: Path) -> tuple[Example, ...]:
    """The pictures; a folder without them still gives a report."""
    if not path.exists():
        return ()
    with reading(path, "delete it to go without pictures"):
        found = load_arrays(path)
        positions = [int(key[2:]) for key in found if key.startswith("x_")]
    return tuple(Example(p, found[f"x_{p}"], found.get(f"adv_{p}"), found.get(f"why_{p}")) for p in positions)
