"""Recipes: a training set-up as a table of plain values, validated before any work starts.

A recipe comes from a shipped name, a TOML file, a run folder, a dict or a `Recipe`; overrides are laid over it. The
result is fully resolved: every default is written out, so that the `recipe.toml` of a run repeats it.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import InputError, StorageError, did_you_mean
from holdfast.registry import get
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.train import objectives as _objectives  # noqa: F401  (registers them)
from holdfast.train.schedules import BUDGETS, LEARNING_RATES, Schedule, with_budget
from holdfast.train.toml import write_toml
from holdfast.train.validate import (
    AT_LEAST_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Choice,
    Rule,
    build,
    fill_options,
)


def _key(rule: Rule, **default: Any) -> Any:
    return field(metadata={"rule": rule}, **default)


@dataclass(frozen=True, kw_only=True)
class OptimizerPart:
    """`[optimizer]`; `momentum` and `nesterov` are read by sgd alone, `clip_norm` bounds the norm of the gradient."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = _key(POSITIVE)
    momentum: float = _key(FRACTION, default=0.9)
    nesterov: bool = False
    weight_decay: float = _key(NOT_NEGATIVE, default=0.0)
    clip_norm: float | None = _key(POSITIVE, default=None)


@dataclass(frozen=True, kw_only=True)
class AugmentPart:
    """`[augment]`: `crop` is the padding in pixels (0: no crops), `flip` mirrors left to right."""

    crop: int = _key(NOT_NEGATIVE, default=0)
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class AveragePart:
    """`[average]` of the weights: "ema" after every step with `decay`, "swa" after every epoch, from `start_epoch`."""

    name: Literal["none", "ema", "swa"] = "none"
    decay: float = _key(FRACTION, default=0.999)
    start_epoch: int = _key(NOT_NEGATIVE, default=0)


@dataclass(frozen=True, kw_only=True)
class EvaluatePart:
    """`[evaluate]` on the validation split: the first `count` inputs, PGD with `attack_steps` (0: no attack).

    The best epoch is the one with the highest `select`: "robust" or "clean" accuracy; "auto" is robust if the
    objective has an adversary and there is an attack.
    """

    attack_steps: int = _key(NOT_NEGATIVE, default=10)
    count: int = _key(AT_LEAST_ONE, default=1000)
    select: Literal["auto", "robust", "clean"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training set-up; docs/training.md explains every key.

    Attributes:
        name: of the recipe.  summary: one line.  needs: what it takes, in words.
        data: name or path for `load_data`.  model: name and options for `make_model`.
        threat: as text, such as "linf:8/255"; None if there is no adversary.
        validation: fraction of the training split held out to choose the best epoch.
    """

    name: str = "custom"
    summary: str = ""
    needs: str = ""
    data: str | None = None
    threat: str | None = None
    epochs: int = _key(AT_LEAST_ONE)
    batch_size: int = _key(AT_LEAST_ONE, default=128)
    seed: int = 0
    validation: float = _key(FRACTION, default=0.1)
    tensorboard: bool = False
    model: Choice | None = None
    objective: Choice
    optimizer: OptimizerPart
    learning_rate: Choice = field(default_factory=lambda: Choice("constant", {}))
    warmup: float = _key(NOT_NEGATIVE, default=0.0)
    budget: Choice = field(default_factory=lambda: Choice("constant", {}))
    augment: AugmentPart = AugmentPart()
    average: AveragePart = AveragePart()
    evaluate: EvaluatePart = EvaluatePart()

    @property
    def adversary(self) -> Threat | None:
        """The threat as an object."""
        return None if self.threat is None else read_threat(self.threat)

    @property
    def selects(self) -> str:
        """Which validation accuracy picks the best epoch: "robust" or "clean"."""
        if self.evaluate.select != "auto":
            return self.evaluate.select
        adversarial = bool(get("train", self.objective.name).threats) and self.evaluate.attack_steps > 0
        return "robust" if adversarial else "clean"


Source = str | Path | Mapping[str, Any] | Recipe


def load_recipe(source: Source, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Reads, overrides and validates a recipe.

    Args:
        source: a shipped name, a .toml file, a run folder, a dict or a Recipe.
        overrides: keys, dotted or nested, to their values. A new `name` of the model, the objective or a schedule
            drops the options of the old one.

    >>> load_recipe("mnist-mini-at", {"optimizer.lr": 0.05}).optimizer.lr
    0.05
    """
    return _resolved(build(Recipe, _merged(_table(source), overrides or {})))


def list_recipes() -> list[Recipe]:
    """The shipped recipes; `.name`, `.summary` and `.needs` say what each one is."""
    return [load_recipe(name) for name in _shipped()]


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


def to_table(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain nested values; keys that are None are left out."""
    return {f.name: _plain(getattr(recipe, f.name)) for f in fields(recipe) if getattr(recipe, f.name) is not None}


def to_toml(recipe: Recipe) -> str:
    """The recipe as a TOML file that `load_recipe` reads back to an equal one."""
    return write_toml(to_table(recipe))


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": value.name, **{key: option for key, option in value.options.items() if option is not None}}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return {key: part for key, part in parts.items() if part is not None}
    return value


def _shipped() -> list[str]:
    folder = resources.files("holdfast.train") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


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
        text = (resources.files("holdfast.train") / "recipes" / f"{source}.toml").read_text(encoding="utf-8")
        return {"name": source, **tomllib.loads(text)}
    try:
        return {"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))}
    except OSError as error:
        raise StorageError(f"cannot read the recipe {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error


_CHOICES = [f.name for f in fields(Recipe) if f.type in (Choice, Choice | None)]


def _merged(table: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    nested: dict[str, Any] = {}
    for dotted, value in overrides.items():
        key, _, rest = dotted.partition(".")
        if not (rest or isinstance(value, Mapping)):
            merged[key] = value
            continue
        part = nested.setdefault(key, {})
        part.update({rest: value} if rest else value)
    for key, part in nested.items():
        old = merged.get(key)
        if not isinstance(old, dict) or (key in _CHOICES and part.get("name", old.get("name")) != old.get("name")):
            old = {}
        merged[key] = {**old, **part}
    return merged


def _resolved(recipe: Recipe) -> Recipe:
    """The recipe with the defaults of its objective and schedules filled in, after the checks that span keys."""
    _check(recipe)
    return replace(
        recipe,
        threat=None if recipe.threat is None else str(recipe.adversary),
        objective=_filled_objective(recipe),
        learning_rate=_filled_schedule(recipe.learning_rate, LEARNING_RATES, "learning_rate", recipe.epochs),
        budget=_filled_schedule(recipe.budget, BUDGETS, "budget", recipe.epochs),
    )


def _check(recipe: Recipe) -> None:
    try:
        threat = recipe.adversary
    except InputError as error:
        raise InputError(f"threat: {error}") from None
    if recipe.budget.name != "constant" and threat is not None:
        with_budget(threat, 0.5)
    if recipe.optimizer.nesterov and recipe.optimizer.momentum == 0:
        raise InputError("optimizer.nesterov: needs optimizer.momentum > 0")
    if recipe.average.name != "none" and recipe.average.start_epoch >= recipe.epochs:
        raise InputError(
            f"average.start_epoch: expected an epoch before the last, {recipe.epochs - 1}, "
            f"got {recipe.average.start_epoch}"
        )
    if recipe.evaluate.select == "robust" and (threat is None or recipe.evaluate.attack_steps == 0):
        raise InputError("evaluate.select: 'robust' needs a threat and evaluate.attack_steps > 0")


def _filled_objective(recipe: Recipe) -> Choice:
    try:
        method = get("train", recipe.objective.name)
    except InputError as error:
        raise InputError(f"objective.name: {error}") from None
    threat = recipe.adversary
    if method.threats and threat is None:
        raise InputError(f"threat: missing; the objective '{method.name}' needs one, such as threat = 'linf:0.1'")
    if method.threats:
        method.check(threat, {})
    return Choice(method.name, fill_options(method.function, recipe.objective.options, "objective"))


def _filled_schedule(choice: Choice, table: Mapping[str, Schedule], where: str, epochs: int) -> Choice:
    if choice.name not in table:
        raise InputError(f"{where}.name: unknown schedule '{choice.name}'. " + did_you_mean(choice.name, table))
    options = fill_options(table[choice.name], choice.options, where)
    try:
        table[choice.name](0.0, epochs, **options)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return Choice(choice.name, options)
