"""Write TOML; Python itself can only read it."""

import json
from typing import Any

from holdfast.errors import InputError


def write_toml(table: dict[str, Any]) -> str:
    r"""Texts, numbers, lists and tables as a TOML file; the tables of the first level get a heading each.

    >>> write_toml({"epochs": 3, "optimizer": {"lr": 0.1}})
    'epochs = 3\n\n[optimizer]\nlr = 0.1\n'
    """
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, part in table.items():
        if isinstance(part, dict):
            lines += ["", f"[{_key(key)}]", *(f"{_key(k)} = {_value(v)}" for k, v in part.items())]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _text(text: str) -> str:
    """JSON escapes a text as TOML wants it, but for the character 7f."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    raise InputError(f"a recipe holds texts, numbers, lists and tables, got {value!r} ({type(value).__name__})")
