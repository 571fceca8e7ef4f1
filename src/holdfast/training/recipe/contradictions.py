"""What keys of a recipe contradict each other: schedules beyond the run, periods, what picks the best epoch."""

from holdfast.attacks.core.ascent import BALLS
from holdfast.errors import InputError
from holdfast.registry import get_objective
from holdfast.threats import Linf, Threat
from holdfast.training.recipe.recipe import Recipe
from holdfast.training.schedules import with_budget


def check_recipe(recipe: Recipe) -> None:
    """Refuse what no part of the recipe can see by itself; the message names the key."""
    try:
        threat = recipe.adversary
    except InputError as error:
        raise InputError(f"threat: {error}") from None
    _check_schedules(recipe, threat)
    if recipe.optimizer.nesterov and recipe.optimizer.momentum == 0:
        raise InputError("optimizer.nesterov: needs optimizer.momentum > 0")
    if recipe.average.name != "none" and recipe.average.start_epoch >= recipe.epochs:
        raise InputError(
            f"average.start_epoch: expected an epoch before the last, {recipe.epochs - 1}, "
            f"got {recipe.average.start_epoch}"
        )
    if recipe.evaluate.patience is not None and recipe.validation == 0:
        raise InputError("evaluate.patience: needs validation > 0, the inputs that say whether an epoch was better")
    _check_periods(recipe)
    if recipe.subset is not None and recipe.subset.kind != "random" and recipe.subset.run is None:
        raise InputError(f"subset.run: missing; give the folder of a run whose losses say what is {recipe.subset.kind}")
    if recipe.evaluate.select == "robust" and (threat is None or recipe.evaluate.attack_steps == 0):
        raise InputError("evaluate.select: 'robust' needs a threat and evaluate.attack_steps > 0")
    if recipe.evaluate.select == "noisy" and recipe.view is None:
        raise InputError("evaluate.select: 'noisy' needs an objective with noise, such as 'gaussian' or 'ablation'")


def check_log(recipe: Recipe) -> None:
    """Refuse losses under a threat that neither the objective nor PGD can attack."""
    threat, attacked = recipe.adversary, get_objective(recipe.objective.name).threats
    if recipe.log.losses and threat is not None and attacked and threat.name not in BALLS:
        raise InputError(
            f"log.losses: the loss under '{threat}' cannot be measured by PGD, which works on {', '.join(BALLS)}; "
            "leave it out"
        )


def _check_schedules(recipe: Recipe, threat: Threat | None) -> None:
    """A budget that cannot rise, or not within the run, or beyond the range of the inputs."""
    options, length = recipe.budget.options, recipe.period(recipe.epochs)[1]
    if recipe.budget.name != "constant" and threat is not None and not recipe.ramps:
        with_budget(threat, 0.5)
    for key, epoch in (("budget.start", options.get("start")), ("budget.end", options.get("end"))):
        if isinstance(epoch, int | float) and epoch > length:
            raise InputError(
                f"{key}: the budget rises until epoch {epoch:g}, but the run ends after {length:g}; the model would "
                "never be trained for it. Shorten the rise with the run, or leave out budget.end"
            )
    if recipe.warmup > length:
        raise InputError(f"warmup: expected at most the {length:g} epochs of the run, got {recipe.warmup:g}")
    final = options.get("final", 1.0)
    if isinstance(threat, Linf) and isinstance(final, int | float) and threat.eps * final > threat.high - threat.low:
        raise InputError(
            f"threat: a budget of {threat.eps * final:g} is beyond the range of the inputs, {threat.low:g} to "
            f"{threat.high:g}; no model keeps its class there"
        )


def _check_periods(recipe: Recipe) -> None:
    if not recipe.periods:
        return
    if list(recipe.periods) != sorted(set(recipe.periods)) or recipe.periods[-1] != recipe.epochs:
        raise InputError(
            f"periods: expected rising epochs that end with epochs = {recipe.epochs}, got {list(recipe.periods)}"
        )
    if recipe.average.name != "none" or recipe.evaluate.patience is not None:
        raise InputError("periods: excludes average and evaluate.patience; the ensemble is made of the last weights")
