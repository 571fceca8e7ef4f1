"""Options of a method that come from outside, such as the command line: refused before any work is done."""

import inspect
import math
from collections.abc import Callable, Mapping, Set
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from holdfast.errors import InputError, did_you_mean

# Set by the caller: `chunk` is an option of the front door, `goal` is the threat's budget, `data` are the inputs.
_NOT_FOR_USERS = frozenset({"noise", "chunk", "goal", "data"})


def check_options(
    method: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    hidden: Set[str] = _NOT_FOR_USERS,
) -> dict[str, Any]:
    """The options as a dict, or an error if `function` does not take one of them, or not with such a value.

    `hidden` are the names of those that are not for users.

    >>> def blur(x, *, steps: int = 3, size: float | None = None): ...
    >>> check_options("blur", blur, {"steps": 2, "size": 1})
    {'steps': 2, 'size': 1}
    """
    parameters = inspect.signature(function).parameters.values()
    known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - hidden
    types = get_type_hints(function)
    for name, value in options.items():
        if name not in known:
            raise InputError(f"method '{method}' has no option '{name}'. " + did_you_mean(name, known))
        if not _accepts(types[name], value):
            raise InputError(
                f"option '{name}' of the method '{method}' must be {_text(types[name])}, "
                f"got {value!r} ({type(value).__name__})"
            )
    return dict(options)


def _accepts(expected: Any, value: object) -> bool:
    """Is the value of the annotated type? Numbers must be finite, and True is no number."""
    if get_origin(expected) in (Union, UnionType):
        return any(_accepts(choice, value) for choice in get_args(expected))
    if get_origin(expected) is Literal:
        return value in get_args(expected)
    if expected in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole or (expected is float and isinstance(value, float) and math.isfinite(value))
    return isinstance(value, get_origin(expected) or expected)


def _text(expected: Any) -> str:
    """The type in words."""
    if get_origin(expected) in (Union, UnionType):
        return " or ".join(_text(choice) for choice in get_args(expected) if choice is not NoneType)
    if get_origin(expected) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(expected))
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}
    return words.get(expected, "a function" if get_origin(expected) is Callable else str(expected))
