"""What `holdfast methods KIND NAME` prints: all that the registry knows about one method."""

import inspect
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.registry import Method
from holdfast.utils.options import Option


def default_text(option: Option) -> str:
    """The default as a user would write it.

    >>> default_text(Option("norm", bool, True)), default_text(Option("step", float | None, None))
    ('true', 'none')
    """
    value: Any = option.default
    if option.required:
        return "required"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value.__name__ if inspect.isfunction(value) else str(value)


def source(method: Method) -> str:
    """Path of the file that holds the method, from its package on."""
    function = inspect.unwrap(getattr(method.function, "func", method.function))
    path = Path(inspect.getfile(function))
    depth = len(function.__module__.split(".")) + (path.stem == "__init__")
    return "/".join(path.parts[-depth:])


def method_card(method: Method) -> RenderableType:
    """One method in full: its facts, then its options with type, range and default."""
    facts = Table.grid(padding=(0, 2))
    for name, fact in (
        ("kind", method.kind),
        ("guarantee", method.guarantee),
        ("threats", " ".join(method.threats) or "-"),
        ("reference", method.reference),
        ("file", source(method)),
    ):
        facts.add_row(name, Text(fact))
    options = Table("option", "type and range", "default", box=None, header_style="bold", pad_edge=False)
    for option in method.typed_options.values():
        options.add_row(option.name, Text(option.text), Text(default_text(option)))
    parts = [options] if method.typed_options else []
    return Group(Text(f"{method.name}: {method.summary}"), "", facts, "", *parts)
