"""Recipes: a training set-up as a table of plain values, validated before any work starts.

A recipe comes from a shipped name, a TOML file, a run folder, a dict or a `Recipe`; overrides are laid over it. The
result is fully resolved: every default is written out, so that the `recipe.toml` of a run repeats it.
"""

import bisect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from holdfast.errors import HoldfastError, InputError, StorageError, did_you_mean
from holdfast.random import Noise
from holdfast.registry import Objective, Part, get, get_objective, methods
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.training import attack as _attack  # noqa: F401  (each registers the methods of its section)
from holdfast.training import average as _average  # noqa: F401
from holdfast.training import objectives as _objectives  # noqa: F401
from holdfast.training import perturb_weights as _perturb_weights  # noqa: F401
from holdfast.training import regularizers as _regularizers  # noqa: F401
from holdfast.training import targets as _targets  # noqa: F401
from holdfast.training.recipe.contradictions import check_combination, check_recipe
from holdfast.training.schedules import BUDGETS, LEARNING_RATES, Schedule
from holdfast.utils.limits import check_values, read_text, without_recursion
from holdfast.utils.options import (
    AT_LEAST_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    UNIT,
    Choice,
    Rule,
    build,
    fill_options,
)
from holdfast.utils.toml import write_toml


def _key(rule: Rule, **default: Any) -> Any:
    return field(metadata={"rule": rule}, **default)


@dataclass(frozen=True, kw_only=True)
class OptimizerPart:
    """`[optimizer]`; sgd and muon read `momentum`, sgd reads `nesterov`; `clip_norm` bounds that of the gradient."""

    name: Literal["sgd", "adam", "adamw", "muon"] = "sgd"
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
class ExtraPart:
    """`[extra]` training data, a name or path for `load_data`; `share` of every batch comes from it.

    An epoch is then one pass over the additional data.
    """

    data: str
    share: float = _key(UNIT, default=0.5)


@dataclass(frozen=True, kw_only=True)
class EvaluatePart:
    """`[evaluate]` on the validation split: the first `count` inputs, PGD with `attack_steps` (0: no attack).

    `certify` names the certificate that they are proved by, at the full budget; by default that of an objective which
    trains for one, "none" for no proof. The best epoch is the one with the highest `select`: "certified", "noisy",
    "robust" or "clean" accuracy; "auto" is certified if there is a certificate, else noisy if the objective trains a
    smoothed classifier, else robust if the objective has an adversary and there is an attack. Until the budget has
    risen to its end no epoch is the best. "last" keeps the last epoch, whatever its score. With `patience`, the run
    ends after so many epochs in a row that were not the best.
    """

    attack_steps: int = _key(NOT_NEGATIVE, default=10)
    certify: str | None = None
    count: int = _key(AT_LEAST_ONE, default=1000)
    select: Literal["auto", "certified", "noisy", "robust", "clean", "last"] = "auto"
    patience: int | None = _key(AT_LEAST_ONE, default=None)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training set-up; docs/training.md explains every key.

    Attributes:
        name: of the recipe.  summary: one line.  needs: what it takes, in words.
        data: name or path for `load_data`.  model: name and options for `make_model`.
        threat: as text, such as "linf:8/255"; None if there is no adversary.
        validation: fraction of the training split held out to choose the best epoch.
        init: file of a model whose weights the run starts from.
        weights: how fresh weights are drawn: "default" by torch's rules, "ibp" so that intervals keep their width.
        objective: the loss.  attack: how it finds adversarial examples.  targets: what outputs are compared with.
        regularizers: tables of options by name.  perturb_weights: how the weights are moved before the loss is taken.
        periods: epochs at which the schedules start anew and a snapshot of the model is kept for an ensemble.
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
    init: str | None = None
    weights: Literal["default", "ibp"] = "default"
    periods: tuple[int, ...] = _key(AT_LEAST_ONE, default=())
    model: Choice | None = None
    objective: Choice
    attack: Choice | None = None
    targets: Choice | None = None
    regularizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    perturb_weights: Choice | None = None
    optimizer: OptimizerPart
    learning_rate: Choice = field(default_factory=lambda: Choice("constant", {}))
    warmup: float = _key(NOT_NEGATIVE, default=0.0)
    budget: Choice = field(default_factory=lambda: Choice("constant", {}))
    augment: AugmentPart = AugmentPart()
    average: AveragePart = AveragePart()
    extra: ExtraPart | None = None
    evaluate: EvaluatePart = EvaluatePart()

    @property
    def adversary(self) -> Threat | None:
        """The threat as an object."""
        return None if self.threat is None else read_threat(self.threat)

    @property
    def selects(self) -> str:
        """What picks the best epoch: one of the accuracies on the validation split, or "last"."""
        if self.evaluate.select != "auto":
            return self.evaluate.select
        if self.evaluate.certify != "none":
            return "certified"
        if self.view is not None:
            return "noisy"
        adversarial = bool(get("train", self.objective.name).threats) and self.evaluate.attack_steps > 0
        return "robust" if adversarial else "clean"

    @property
    def view(self) -> Callable[[Tensor, Noise], Tensor] | None:
        """What a smoothed classifier sees of x, for an objective that trains one."""
        view = get_objective(self.objective.name).view
        return None if view is None else partial(view, **self.objective.options)

    @property
    def ramps(self) -> bool:
        """Whether the objective follows the rise of the budget by itself, as patches and pixels are not scaled."""
        return get_objective(self.objective.name).ramps

    @property
    def single_step(self) -> bool:
        """Whether the adversarial examples of training come from one step each, so that training may collapse."""
        names = (self.objective.name, None if self.attack is None else self.attack.name)
        return any(name in SINGLE_STEP for name in names)

    def period(self, t: float) -> tuple[float, float]:
        """The progress `t` in epochs as a position in its period, and the length of that period."""
        ends = (0, *self.periods) if self.periods else (0, self.epochs)
        last = min(bisect.bisect_right(ends, t), len(ends) - 1)
        return t - ends[last - 1], ends[last] - ends[last - 1]


Source = str | Path | Mapping[str, Any] | Recipe
_LARGEST = 32 * 2**10  # bytes of a recipe: the shipped ones have 1,000; tomllib takes long for one long dotted key
SINGLE_STEP = ("fgsm", "fgsm-rs", "n-fgsm", "atta", "atas", "free", "yopo")


def load_recipe(source: Source, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Reads, overrides and validates a recipe.

    Args:
        source: a shipped name, a .toml file, a run folder, a dict or a Recipe.
        overrides: keys, dotted or nested, to their values. A new `name` of the model, the objective or a schedule
            drops the options of the old one.

    >>> load_recipe("mnist-mini-at", {"optimizer.lr": 0.05}).optimizer.lr
    0.05
    """
    try:
        return _resolved(build(Recipe, _merged(_table(source), overrides or {})))
    except OverflowError as error:
        raise InputError(f"a number of the recipe is too large: {error}") from error


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
    folder = resources.files("holdfast.training.recipe") / "shipped"
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
        text = (resources.files("holdfast.training.recipe") / "shipped" / f"{source}.toml").read_text(encoding="utf-8")
        return {"name": source, **tomllib.loads(text)}
    try:
        text = read_text(path, _LARGEST)
        table = without_recursion(lambda: tomllib.loads(text))
        check_values(table, finite=False)
    except OSError as error:
        raise StorageError(f"cannot read the recipe {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path} is not valid TOML, or not a recipe: {error}") from error
    return {"name": path.stem, **table}


# Sections that an objective may be composed of.
SECTIONS = ("attack", "targets", "regularizers", "perturb_weights")
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
    takes = {method.name: method.takes for method in methods("train") if isinstance(method, Objective)}
    kept = takes.get(str(now.get("name")), ())
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


def _resolved(recipe: Recipe) -> Recipe:
    """The recipe with the defaults of its objective and schedules filled in, after the checks that span keys."""
    check_recipe(recipe)
    objective = _filled_objective(recipe)
    check_combination(recipe)
    return replace(
        recipe,
        threat=None if recipe.threat is None else str(recipe.adversary),
        objective=objective,
        **_filled_parts(recipe),
        learning_rate=_filled_schedule(recipe.learning_rate, LEARNING_RATES, "learning_rate", recipe.epochs),
        budget=_filled_schedule(recipe.budget, BUDGETS, "budget", recipe.epochs),
        evaluate=replace(recipe.evaluate, certify=_certificate(recipe)),
    )


def _certificate(recipe: Recipe) -> str:
    """The certificate of the validation, which must fit the threat; "none" if there is none."""
    name = recipe.evaluate.certify or get_objective(recipe.objective.name).certificate or "none"
    if name != "none":
        if recipe.adversary is None:
            raise InputError(f"evaluate.certify: '{name}' needs a threat, such as threat = 'linf:0.1'")
        try:
            get("certify", name).check(recipe.adversary, {})
        except HoldfastError as error:
            raise InputError(f"evaluate.certify: {error}") from None
    elif recipe.evaluate.select == "certified":
        raise InputError("evaluate.select: 'certified' needs evaluate.certify, such as 'crown-ibp'")
    return name


def _filled_objective(recipe: Recipe) -> Choice:
    method = _method("objective", recipe.objective.name, "objective.name")
    threat = recipe.adversary
    if method.threats and threat is None:
        raise InputError(f"threat: missing; the objective '{method.name}' needs one, such as threat = 'linf:0.1'")
    if method.threats:
        method.check(threat, {})
    return Choice(method.name, fill_options(method.function, recipe.objective.options, "objective"))


def _filled_parts(recipe: Recipe) -> dict[str, Any]:
    """The parts that the objective is composed of, each known, fit for the threat, and with its options filled in."""
    takes, objective = get_objective(recipe.objective.name).takes, recipe.objective.name
    for part in SECTIONS:
        if getattr(recipe, part) and part not in takes:
            raise InputError(
                f"{part}: the objective '{objective}' has no such part; it takes: {', '.join(takes) or 'none'}"
            )
    attack = recipe.attack or (Choice("pgd", {}) if "attack" in takes else None)
    return {
        "attack": _filled_part(recipe, "attack", attack),
        "targets": _filled_part(recipe, "targets", recipe.targets),
        "perturb_weights": _filled_part(recipe, "perturb_weights", recipe.perturb_weights),
        "regularizers": {
            name: _filled(recipe, "regularizers", name, options, f"regularizers.{name}").options
            for name, options in recipe.regularizers.items()
        },
    }


def _filled_part(recipe: Recipe, part: str, choice: Choice | None) -> Choice | None:
    return None if choice is None else _filled(recipe, part, choice.name, choice.options, part)


def _filled(recipe: Recipe, part: str, name: str, options: Mapping[str, Any], where: str) -> Choice:
    method = _method(part, name, where)
    threat = recipe.adversary
    if method.threats and threat is None:
        raise InputError(f"threat: missing; {where} needs one, such as threat = 'linf:0.1'")
    if method.threats:
        try:
            method.check(threat, {})
        except HoldfastError as error:
            raise InputError(f"{where}: {error}") from None
    return Choice(name, fill_options(method.function, options, where))


def _method(part: str, name: str, where: str) -> Part:
    """The training method of that name, which must be for this part of a recipe."""
    known = [method.name for method in methods("train") if method.part == part]
    try:
        method = get("train", name)
    except InputError:
        raise InputError(f"{where}: unknown name '{name}'. " + did_you_mean(name, known)) from None
    if method.part != part:
        place = f"[regularizers.{name}]" if method.part == "regularizers" else f"[{method.part}]"
        raise InputError(f"{where}: '{name}' does not fit here, it goes into {place}. " + did_you_mean(name, known))
    return method


def _filled_schedule(choice: Choice, table: Mapping[str, Schedule], where: str, epochs: int) -> Choice:
    if choice.name not in table:
        raise InputError(f"{where}.name: unknown schedule '{choice.name}'. " + did_you_mean(choice.name, table))
    options = fill_options(table[choice.name], choice.options, where)
    try:
        table[choice.name](0.0, epochs, **options)
    except (InputError, ArithmeticError) as error:
        raise InputError(f"{where}: {error}") from None
    return Choice(choice.name, options)
