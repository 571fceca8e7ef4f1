"""From the plain values of a TOML file to typed ones, with errors that name the dotted key."""

import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast.errors import InputError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A range: the text that ends the sentence "expected a number ...", and the test."""

    text: str
    holds: Callable[[Any], bool]


POSITIVE = Rule("> 0", lambda value: value > 0)
AT_LEAST_ONE = Rule(">= 1", lambda value: value >= 1)
NOT_NEGATIVE = Rule(">= 0", lambda value: value >= 0)
FRACTION = Rule(">= 0 and < 1", lambda value: 0 <= value < 1)
UNIT = Rule("between 0 and 1", lambda value: 0 <= value <= 1)
ANY = Rule("", lambda value: True)

# Annotations for the options of objectives and other parts: the range is checked when a recipe is loaded.
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Fraction = Annotated[float, FRACTION]
Unit = Annotated[float, UNIT]
Count = Annotated[int, AT_LEAST_ONE]
Epochs = Annotated[int, NOT_NEGATIVE]


@dataclass(frozen=True)
class Choice:
    """A named thing with its options: the table `name = "at"`, `steps = 10`."""

    name: str
    options: dict[str, Any]


_WORDS: dict[Any, str] = {float: "a number", int: "an integer", bool: "true or false", str: "a text"}


def _fail(where: str, expected: str, value: Any) -> InputError:
    return InputError(f"{where}: expected {expected}, got {value!r}")


def convert(value: Any, kind: Any, where: str, rule: Rule = ANY) -> Any:
    """`value` as the annotated type `kind`, or an error about the key `where`.

    >>> convert(1, float, "optimizer.lr", POSITIVE)
    1.0
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return convert(value, arguments[0], where, arguments[1])
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _fail(where, "a table", value)
        return {str(key): convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if origin in (Union, types.UnionType):
        return None if value is None else convert(value, _without_none(arguments), where, rule)
    if origin is Literal:
        if value not in arguments:
            raise InputError(f"{where}: unknown value {value!r}. " + did_you_mean(str(value), arguments))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _fail(where, "a list", value)
        return tuple(convert(item, arguments[0], f"{where}[{i}]", rule) for i, item in enumerate(value))
    if kind is Choice:
        return _choice(value, where)
    if isinstance(kind, type) and is_dataclass(kind):
        return build(kind, value, where)
    return _plain(value, kind, where, rule)


def _without_none(arguments: tuple[Any, ...]) -> Any:
    """The one type of `T | None`; an option takes no other unions."""
    (kind,) = (a for a in arguments if a is not types.NoneType)
    return kind


def _plain(value: Any, kind: Any, where: str, rule: Rule) -> Any:
    expected = f"{_WORDS[kind]} {rule.text}".strip()
    # In Python a bool is an int; in a recipe it is not.
    fits = isinstance(value, int | float if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    # TOML has whole numbers of 64 bits; Python would read longer ones, which no float can hold.
    fits = fits and not (isinstance(value, int) and abs(value) >= 2**64)
    if not fits or (kind is float and not math.isfinite(value)) or not rule.holds(value):
        raise _fail(where, expected, value)
    return kind(value)


def _choice(value: Any, where: str) -> Choice:
    if not isinstance(value, Mapping):
        raise _fail(where, "a table with a name", value)
    if "name" not in value:
        raise InputError(f"{where}.name: missing; say which one")
    options = {key: option for key, option in value.items() if key != "name"}
    return Choice(convert(value["name"], str, f"{where}.name"), options)


def build(kind: type[T], table: Any, where: str = "") -> T:
    """An instance of the dataclass `kind` from a table; unknown, missing and ill-typed keys are refused."""
    if not isinstance(table, Mapping):
        raise _fail(where, "a table", table)
    prefix = f"{where}." if where else ""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise InputError(f"{prefix}{key}: unknown key. " + did_you_mean(key, known))
    for key, f in known.items():
        if key not in table and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(f"{prefix}{key}: missing; this key has no default")
    hints = get_type_hints(kind)
    values = {
        key: convert(table[key], hints[key], f"{prefix}{key}", f.metadata.get("rule", ANY))
        for key, f in known.items()
        if key in table
    }
    return kind(**values)


def fill_options(function: Callable[..., Any], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All keyword-only options of `function`: those given, type-checked, and the defaults of the others."""
    hints = get_type_hints(function, include_extras=True)
    known = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    for key in options:
        if key not in known:
            raise InputError(f"{where}.{key}: unknown option. " + did_you_mean(key, known))
    missing = [key for key, p in known.items() if key not in options and p.default is p.empty]
    if missing:
        raise InputError(f"{where}.{missing[0]}: missing; this option has no default")
    given = {key: convert(value, hints[key], f"{where}.{key}") for key, value in options.items()}
    return {key: given.get(key, p.default) for key, p in known.items()}
