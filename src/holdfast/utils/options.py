"""Typed options with ranges: one vocabulary for recipes, for the command line and for every front door in Python.

A method annotates its keyword-only options, as in `steps: Count = 20`. The annotation is the check, the text in the
documentation and the text of the error.
"""

import collections.abc
import inspect
import math
import numbers
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
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
EVEN = Rule(">= 2 and even", lambda value: value >= 2 and value % 2 == 0)
NOT_NEGATIVE = Rule(">= 0", lambda value: value >= 0)
FRACTION = Rule(">= 0 and < 1", lambda value: 0 <= value < 1)
UNIT = Rule("between 0 and 1", lambda value: 0 <= value <= 1)
SHARE = Rule("> 0 and <= 1", lambda value: 0 < value <= 1)
INSIDE = Rule("> 0 and < 1", lambda value: 0 < value < 1)
ANY = Rule("", lambda value: True)

# Annotations for options.
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Fraction = Annotated[float, FRACTION]
Unit = Annotated[float, UNIT]
Count = Annotated[int, AT_LEAST_ONE]
Even = Annotated[int, EVEN]
Epochs = Annotated[int, NOT_NEGATIVE]
Share = Annotated[float, SHARE]
Inside = Annotated[float, INSIDE]
Factor = Annotated[float, AT_LEAST_ONE]
Whole = Annotated[int, NOT_NEGATIVE]


@dataclass(frozen=True)
class Choice:
    """A named thing with its options: the table `name = "at"`, `steps = 10`."""

    name: str
    options: dict[str, Any]


_WORDS: dict[Any, str] = {float: "a number", int: "an integer", bool: "true or false", str: "a text"}


def _fail(where: str, expected: str, value: Any) -> InputError:
    return InputError(f"{where}: expected {expected}, got {value!r}")


def describe(kind: Any, rule: Rule | None = None) -> str:
    """The annotated type in words.

    >>> describe(Count), describe(float | None), describe(Literal["ce", "dlr"])
    ('an integer >= 1', 'a number or none', "one of 'ce', 'dlr'")
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return describe(arguments[0], arguments[1])
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument, rule) for argument in arguments)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if kind is types.NoneType:
        return "none"
    if (origin or kind) is collections.abc.Callable:
        return "a function"
    words = (
        _WORDS.get(kind)
        or {dict: "a table", tuple: "a list", collections.abc.Sequence: "a list"}.get(origin or kind)
        or _name(kind)
    )
    return f"{words} {rule.text}".strip() if rule is not None else words


def _name(kind: Any) -> str:
    return (
        f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        if isinstance(kind, type)
        else str(kind).replace("typing.", "")
    )


def convert(value: Any, kind: Any, where: str, rule: Rule = ANY) -> Any:
    """`value` as the annotated type `kind`, or an error that begins with `where`.

    >>> convert(1, float, "optimizer.lr", POSITIVE)
    1.0
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or getattr(kind, "_is_protocol", False):
        return value
    if origin is Annotated:
        return convert(value, arguments[0], where, arguments[1])
    if origin in (Union, types.UnionType):
        return _one_of(value, arguments, where, rule)
    if origin is Literal:
        if value not in arguments:
            raise InputError(f"{where}: unknown value {value!r}. " + did_you_mean(str(value), arguments))
        return value
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _fail(where, "a table", value)
        return {str(key): convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _fail(where, "a list", value)
        return tuple(convert(item, arguments[0], f"{where}[{i}]", rule) for i, item in enumerate(value))
    if kind is Choice:
        return _choice(value, where)
    if kind in _WORDS:
        return _plain(value, kind, where, rule)
    if (origin or kind) is collections.abc.Callable:
        if not callable(value):
            raise _fail(where, describe(kind), value)
        return value
    if isinstance(value, origin or kind):
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        return build(kind, value, where)
    raise _fail(where, describe(kind), value)


def _one_of(value: Any, kinds: tuple[Any, ...], where: str, rule: Rule) -> Any:
    """The value as the first of several types that takes it."""
    if value is None:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    if len(kinds) == 1:
        return convert(value, kinds[0], where, rule)
    for kind in kinds:
        try:
            return convert(value, kind, where, rule)
        except InputError:
            continue
    raise _fail(where, " or ".join(describe(kind, rule) for kind in kinds), value)


def _plain(value: Any, kind: Any, where: str, rule: Rule) -> Any:
    abstract = {float: numbers.Real, int: numbers.Integral}.get(kind, kind)  # scalars of NumPy are numbers as well
    # In Python a bool is an int; as an option it is not.
    fits = isinstance(value, abstract) and isinstance(value, bool) == (kind is bool)
    # TOML has whole numbers of 64 bits; Python would read longer ones, which no float can hold.
    fits = fits and not (isinstance(value, int) and abs(value) >= 2**64)
    if not fits or (kind is float and not math.isfinite(value)) or not rule.holds(value):
        raise _fail(where, describe(kind, rule), value)
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
    hints = get_type_hints(kind, include_extras=True)
    values = {
        key: convert(table[key], hints[key], f"{prefix}{key}", f.metadata.get("rule", ANY))
        for key, f in known.items()
        if key in table
    }
    return kind(**values)


@dataclass(frozen=True)
class Option:
    """A keyword-only option of a function: its name, its annotated type and its default."""

    name: str
    kind: Any
    default: Any

    @property
    def required(self) -> bool:
        """True if there is no default."""
        return self.default is inspect.Parameter.empty

    @property
    def plain(self) -> bool:
        """True if a text can give its value: numbers, words, choices and lists of them."""
        return _is_plain(self.kind)

    @property
    def text(self) -> str:
        """The type and the range in words."""
        return describe(self.kind)


def _is_plain(kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_plain(arguments[0])
    if origin in (Union, types.UnionType, tuple):
        return any(_is_plain(argument) for argument in arguments if argument is not types.NoneType)
    return origin is Literal or kind in _WORDS


@cache
def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """The keyword-only options of `function` by name."""
    hints = get_type_hints(function, include_extras=True)
    taken = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for p in taken:
        if p.name not in hints:
            name = getattr(function, "__name__", function)
            raise InputError(
                f"the option '{p.name}' of the function {name} has no type; write one, as in steps: Count = 20"
            )
    return {p.name: Option(p.name, hints[p.name], p.default) for p in taken}


F = TypeVar("F", bound=Callable[..., Any])


def options_from(base: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function that ends in `**options` the keyword-only options of `base` in their place.

    >>> def blur(x, *, steps: Count = 3): ...
    >>> @options_from(blur)
    ... def blur_twice(x, **options):
    ...     return blur(blur(x, **options), **options)
    >>> list(options_of(blur_twice))
    ['steps']
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = {p.name: p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
        shared = {p.name: p for p in inspect.signature(base).parameters.values() if p.kind is p.KEYWORD_ONLY}
        taken = (own | shared | own).values()
        function.__annotations__ = {p.name: p.annotation for p in taken} | {"return": signature.return_annotation}
        function.__signature__ = signature.replace(parameters=list(taken))  # type: ignore[attr-defined]
        return function

    return decorate


def check_options(known: Mapping[str, Option], options: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The given options with their types and ranges checked; errors name their `owner`.

    >>> def blur(x, *, steps: Count = 3, size: float | None = None): ...
    >>> check_options(options_of(blur), {"steps": 2, "size": 1}, "method 'blur'")
    {'steps': 2, 'size': 1.0}
    """
    for name in options:
        if name not in known:
            raise InputError(f"{owner} has no option '{name}'. " + did_you_mean(name, known))
    return {
        name: convert(value, known[name].kind, f"option '{name}' of the {owner}") for name, value in options.items()
    }


def check_fields(record: Any) -> None:
    """Check the fields of a dataclass against their annotated types and ranges; defaults are taken as they are.

    Call it in `__post_init__`.

    >>> @dataclass(frozen=True)
    ... class Blur:
    ...     steps: Count = 3
    >>> check_fields(Blur(0))
    Traceback (most recent call last):
    holdfast.errors.InputError: option 'steps' of Blur: expected an integer >= 1, got 0
    """
    hints = get_type_hints(type(record), include_extras=True)
    for field in fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            convert(value, hints[field.name], f"option '{field.name}' of {type(record).__name__}")


def fill_options(function: Callable[..., Any], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All options of `function`: the given ones checked, and the defaults of the others; errors name dotted keys."""
    known = options_of(function)
    for name in options:
        if name not in known:
            raise InputError(f"{where}.{name}: unknown option. " + did_you_mean(name, known))
    missing = [name for name, option in known.items() if name not in options and option.required]
    if missing:
        raise InputError(f"{where}.{missing[0]}: missing; this option has no default")
    given = {name: convert(value, known[name].kind, f"{where}.{name}") for name, value in options.items()}
    return {name: given.get(name, option.default) for name, option in known.items()}
