"""Where recipes come from: a shipped name, a TOML file, a run folder, a dict or a `Recipe`; and overrides."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from holdfast.errors import InputError, StorageError, did_you_mean
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.training.recipe.defaults import resolved
from holdfast.training.recipe.overrides import merged
from holdfast.training.recipe.recipe import Recipe, to_table
from holdfast.utils.limits import check_values, read_text, without_recursion
from holdfast.utils.options import Choice, build

Source = str | Path | Mapping[str, Any] | Recipe
_FOLDER = resources.files("holdfast.training.recipe") / "shipped"
_LARGEST = 32 * 2**10  # bytes of a recipe: the shipped ones have 1,000; tomllib takes long for one long dotted key


def load_recipe(source: Source, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        source: a shipped name, a .toml file, a run folder, a dict or a Recipe.
        overrides: keys, dotted or nested, to their values. A new `name` of the model, the objective or a schedule
            drops the options of the old one.

    >>> load_recipe("mnist-mini-at", {"optimizer.lr": 0.05}).optimizer.lr
    0.05
    """
    try:
        return resolved(build(Recipe, merged(_table(source), overrides or {})))
    except OverflowError as error:
        raise InputError(f"a number of the recipe is too large: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A shipped recipe as its file has it, without validation and defaults; attributes as in `Recipe`.

    A recipe for models and data of the user's own names neither.
    """

    name: str
    summary: str
    needs: str
    threat: str | None
    objective: Choice
    data: str | None = None
    model: Choice | None = None

    @property
    def adversary(self) -> Threat | None:
        return None if self.threat is None else read_threat(self.threat)


def list_recipes() -> list[Listed]:
    """The shipped recipes; `.name`, `.summary` and `.needs` say what each one is. `load_recipe` validates one."""
    return list(_listed())


@cache
def _listed() -> tuple[Listed, ...]:
    return tuple(_entry(_shipped_table(name)) for name in _shipped())


def _entry(table: dict[str, Any]) -> Listed:
    kept = {key: table[key] for key in ("name", "summary", "needs", "objective")}
    kept |= {key: table[key] for key in ("data", "model") if key in table}
    threat = table.get("threat")
    return build(Listed, {**kept, "threat": None if threat is None else str(read_threat(threat))})


@cache
def _shipped() -> tuple[str, ...]:
    return tuple(sorted(file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml")))


def _shipped_table(name: str) -> dict[str, Any]:
    return {"name": name, **tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))}


def _table(source: Source) -> dict[str, Any]:
    if isinstance(source, Recipe):
        return to_table(source)
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if path.is_dir():
        path /= "recipe.toml"
    elif isinstance(source, str) and path.suffix != ".toml" and len(path.parts) == 1:
        if source not in _shipped():
            raise InputError(
                f"unknown recipe '{source}'. " + did_you_mean(source, _shipped()) + " A file of yours ends in .toml."
            )
        return _shipped_table(source)
    try:
        text = read_text(path, _LARGEST)
        table = without_recursion(lambda: tomllib.loads(text))
        check_values(table, finite=False)
    except OSError as error:
        raise StorageError(f"cannot read the recipe {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path} is not valid TOML, or not a recipe: {error}") from error
    return {"name": path.stem, **table}
