"""Which certified training against patches fits into a given time: all places, pooled, proposed or random ones.

The strategies of Chiang et al., "Certified defenses for adversarial patches", 2020, prove the more the more places they
bound, and cost the more. Each is timed for one small step, and the first in `STRATEGIES` whose run fits is taken.
"""

import copy
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from holdfast.certificates import certify
from holdfast.data import Dataset
from holdfast.errors import InputError
from holdfast.registry import get
from holdfast.threats import Patch
from holdfast.training.loop import make_batch, shuffled
from holdfast.training.optimizer import make_optimizer
from holdfast.training.recipe.reading import Source, load_recipe
from holdfast.training.setup import Task, prepare
from holdfast.training.state import RunState
from holdfast.utils.options import Choice


def _places(places: int, pool: int = 1) -> dict[str, Any]:
    """Every option is named, so that it replaces the recipe's."""
    return {"name": "patch", "places": places, "pool": pool, "pool_again": 1}


STRATEGIES: dict[str, dict[str, Any]] = {
    "all": _places(0),
    "pool 2": _places(0, pool=2),
    "pool 4": _places(0, pool=4),
    "guided(10)": {"name": "patch-guided", "per_class": 1},
    "random(10)": _places(10),
    "random(5)": _places(5),
    "random(1)": _places(1),
}
"""From the one that certifies most, in print and here, to the cheapest; see docs/certified-training.md."""

INPUTS = 16  # of a timed step; its time is scaled to the batch, which errs upwards: small batches cost more per input
GUIDE_RATE = 1e-3  # of the U-Net, where the model's own optimiser is not Adam


@dataclass(frozen=True)
class PatchPlan:
    """What fits.

    Attributes:
        strategy: the key in `STRATEGIES`.
        objective: the table `[objective]` for the recipe.
        seconds: predicted wall time of the run, validation included.
        predicted: the same for every strategy, in the order of `STRATEGIES`.
    """

    strategy: str
    objective: dict[str, Any]
    seconds: float
    predicted: dict[str, float]


def plan_patch_training(
    recipe: Source, seconds: float, model: nn.Module | None = None, data: Dataset | str | None = None, **overrides: Any
) -> PatchPlan:
    """Choose the strongest strategy whose whole run takes at most `seconds` on this machine as busy as it is now.

    The objective of the recipe is ignored; its threat must be a rectangular patch. Takes a few seconds itself.

    Raises:
        InputError: no strategy fits; the message says how long the cheapest one takes.

    Example:
        >>> plan = plan_patch_training("mnist-mini-patch", 1e6, threat="patch:27x27")
        >>> plan.strategy, plan.objective
        ('all', {'name': 'patch', 'places': 0, 'pool': 1, 'pool_again': 1})
    """
    task = prepare(load_recipe(recipe, overrides), copy.deepcopy(model), data, None)
    if not isinstance(task.threat, Patch):
        raise InputError(f"threat: a plan needs a patch, such as 'patch:5x5', got '{task.threat}'")
    batches, epochs = len(shuffled(task, 0)), task.recipe.epochs
    check = epochs * _validation(task)
    predicted = {name: batches * epochs * _step(task, _options(task, name)) + check for name in STRATEGIES}
    for name, cost in predicted.items():
        if cost <= seconds:
            return PatchPlan(name, _options(task, name), cost, predicted)
    cheapest = min(predicted, key=lambda name: predicted[name])
    raise InputError(
        f"no strategy against '{task.threat}' fits into {seconds:g} s: {cheapest} takes about "
        f"{predicted[cheapest]:.0f} s; give more time, or fewer epochs"
    )


def _options(task: Task, name: str) -> dict[str, Any]:
    """The objective of a strategy; Adam on the U-Net needs another rate than SGD or Muon on the model."""
    chosen, optimizer = STRATEGIES[name], task.recipe.optimizer
    if chosen["name"] != "patch-guided" or optimizer.name in ("adam", "adamw"):
        return dict(chosen)
    return {**chosen, "rate": min(1.0, GUIDE_RATE / optimizer.lr)}


def _step(task: Task, objective: dict[str, Any]) -> float:
    """Seconds of a training step at the full budget, scaled from a small one; the second of two."""
    options = {key: value for key, value in objective.items() if key != "name"}
    recipe = replace(task.recipe, objective=Choice(objective["name"], options))
    network = copy.deepcopy(task.model).train()
    run = RunState(network, make_optimizer(recipe.optimizer, network), None, data=0)
    function, index = get("train", objective["name"]).function, shuffled(task, 0)[0]
    small = index[: min(INPUTS, len(index))]
    taken = 0.0
    for _ in range(2):
        started = time.perf_counter()
        x, y, context = make_batch(replace(task, recipe=recipe, model=network), run, small, 1)
        loss, _ = function(network, x, y, replace(context, ramp=1.0), **options)
        loss.backward()
        run.optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        taken = time.perf_counter() - started
    return taken * len(index) / len(small)


def _validation(task: Task) -> float:
    """Seconds of a validation, scaled from a few inputs."""
    if task.validation is None or task.recipe.evaluate.certify == "none":
        return 0.0
    assert task.threat is not None
    count = min(task.recipe.evaluate.count, len(task.validation))
    few = task.validation[: min(4, count)]
    network, place = copy.deepcopy(task.model).eval(), next(task.model.parameters())
    started = time.perf_counter()
    certify(network, few.x.to(place), few.y.to(place.device), task.threat, "patch")
    return (time.perf_counter() - started) * count / len(few)
