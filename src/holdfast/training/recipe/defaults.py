"""Defaults: every option of a recipe filled in and checked, so that the `recipe.toml` of a run repeats it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.errors import HoldfastError, InputError, did_you_mean
from holdfast.registry import Part, get, get_objective, methods
from holdfast.training import attack, average, objectives, periods, perturb_weights, prune, regularizers, targets  # noqa: F401  (each registers the methods of its section)
from holdfast.training.recipe.contradictions import check_log, check_recipe
from holdfast.training.recipe.recipe import SECTIONS, Recipe
from holdfast.training.schedules import BUDGETS, LEARNING_RATES, Schedule
from holdfast.utils.options import Choice, fill_options


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with the defaults of its methods and schedules filled in, after all checks."""
    check_recipe(recipe)
    if recipe.average.name != "none":
        _method("average", recipe.average.name, "average.name")
    filled = replace(
        recipe,
        threat=None if recipe.adversary is None else recipe.adversary.canonical,
        objective=_filled_objective(recipe),
        **_filled_parts(recipe),
        prune=None if recipe.prune is None else _filled(recipe, "prune", recipe.prune),
        learning_rate=_filled_schedule(recipe.learning_rate, LEARNING_RATES, "learning_rate", recipe.epochs),
        budget=_filled_schedule(recipe.budget, BUDGETS, "budget", recipe.epochs),
        evaluate=replace(recipe.evaluate, certify=_certificate(recipe)),
    )
    check_log(filled)
    if filled.augment.mixup > 0 and ("targets" not in get_objective(filled.objective.name).takes or filled.targets):
        raise InputError(
            "augment.mixup: mixes labels too, which needs an objective that takes targets, such as 'standard' or "
            "'upat', and no [targets] of its own"
        )
    for choice in filled.parts.values():
        check = get("train", choice.name).check_recipe
        if check is not None:
            check(filled, **choice.options)
    return filled


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
    default = {method.part: Choice(method.name, {}) for method in methods("train") if method.default}
    chosen = {section: default[section] for section in takes if section in default} | recipe.parts
    filled = {where: _filled(recipe, where, choice) for where, choice in chosen.items()}
    tables = {choice.name: choice.options for where, choice in filled.items() if where not in SECTIONS}
    return {**{where: choice for where, choice in filled.items() if where in SECTIONS}, "regularizers": tables}


def _filled(recipe: Recipe, where: str, choice: Choice) -> Choice:
    method = _method(where.partition(".")[0], choice.name, where)
    threat = recipe.adversary
    if method.threats and threat is None:
        raise InputError(f"threat: missing; {where} needs one, such as threat = 'linf:0.1'")
    if method.threats:
        try:
            method.check(threat, {})
        except HoldfastError as error:
            raise InputError(f"{where}: {error}") from None
    return Choice(choice.name, fill_options(method.function, choice.options, where))


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
