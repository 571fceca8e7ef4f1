"""`holdfast methods`: the registry as tables, and all that it knows about one method."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import holdfast as hf
from holdfast.cli.common import table
from holdfast.errors import InputError
from holdfast.registry import KINDS, Method, get
from holdfast.utils.options import Option

app = typer.Typer(add_completion=False)
console = Console()


@app.command()
def methods(
    kind: Annotated[str | None, typer.Argument(help=f"One of {', '.join(KINDS)}.")] = None,
    name: Annotated[str | None, typer.Argument(help="Show this method in full, with its options.")] = None,
) -> None:
    """List the methods: what each does, what it guarantees, for which threats."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"unknown kind '{kind}'; expected one of {', '.join(KINDS)}")
    if kind is not None and name is not None:
        console.print(method_card(get(kind, name)))
        return
    rows = [[m.kind, m.name, m.summary, m.guarantee, " ".join(m.threats), m.reference] for m in hf.methods(kind)]
    console.print(table(["kind", "name", "what it does", "guarantee", "threats", "reference"], rows))


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
