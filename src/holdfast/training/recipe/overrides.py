"""Overrides: keys, dotted or nested, that are laid over the table of a recipe."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from holdfast.errors import InputError
from holdfast.registry import Objective, methods
from holdfast.training.recipe.recipe import SECTIONS, Recipe
from holdfast.utils.options import Choice

_CHOICES = [f.name for f in fields(Recipe) if f.type in (Choice, Choice | None)]


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` of the command line, the value in TOML; a word that is not TOML is taken as a text.

    >>> parse_override("optimizer.lr=0.1"), parse_override("threat=linf:0.1")
    (('optimizer.lr', 0.1), ('threat', 'linf:0.1'))
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise InputError(f"cannot read the override '{text}'; write key=value, such as optimizer.lr=0.1")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        if value[0] in "\"'[{":
            raise InputError(f"cannot read the value of the override '{text}' as TOML") from None
        return key, value


def merged(table: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the overrides laid over it; a new `name` of a part drops the options of the old one."""
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    nested: dict[str, Any] = {}
    for dotted, value in overrides.items():
        key, _, rest = dotted.partition(".")
        if not (rest or isinstance(value, Mapping)):
            merged[key] = value
            continue
        part = nested.setdefault(key, {})
        _put(part, rest, value) if rest else part.update(value)
    for key, part in nested.items():
        old = merged.get(key)
        if not isinstance(old, dict) or (key in _CHOICES and part.get("name", old.get("name")) != old.get("name")):
            old = {}
        merged[key] = {**old, **part} if key != "regularizers" else _merged_tables(old, part)
    return _without_unused(merged, table, nested)


def _without_unused(merged: dict[str, Any], table: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Where the overrides name another objective, the parts of the old one that this one does not take are dropped."""
    old, now = (t.get("objective") for t in (table, merged))
    if not isinstance(old, Mapping) or not isinstance(now, Mapping) or old.get("name") == now.get("name"):
        return merged
    objectives = {method.name: method for method in methods("train") if isinstance(method, Objective)}
    objective = objectives.get(str(now.get("name")))
    kept = () if objective is None else objective.takes
    return {key: part for key, part in merged.items() if key in kept or key in new or key not in SECTIONS}


def _merged_tables(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of options by name, the new options over the old ones; False or None removes a table."""
    merged = dict(old)
    for name, options in new.items():
        merged[name] = {**old.get(name, {}), **options} if isinstance(options, Mapping) else options
    return {name: options for name, options in merged.items() if options is not None and options is not False}


def _put(part: dict[str, Any], dotted: str, value: Any) -> None:
    key, _, rest = dotted.partition(".")
    if rest:
        _put(part.setdefault(key, {}), rest, value)
    else:
        part[key] = value
