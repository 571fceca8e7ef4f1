"""Many settings of EOT against one random model: how strong is each, and what is left after all of them?

Published tables name one number of draws. A better estimate of the gradient should not make an attack weaker; where
more draws leave more accuracy, the attack has a problem, not the attacker. So the accuracy that counts is the one under
all settings together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.batches import noise_for
from holdfast.attacks.core.chance import mean_prediction
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.stages import Stage, run_stages
from holdfast.attacks.core.survivors import broken_by
from holdfast.checks import check_task
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack, get
from holdfast.results import AttackResult
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.utils.options import Count
from holdfast.utils.show import Shown

CONFIRMED = 100
"""Fresh draws that confirm an example of many attempts: each attempt is one more chance to pass few draws by luck."""


@dataclass(frozen=True)
class Setting:
    """An attack by its name, with options; `name` is what tables call it."""

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)


def published(samples: Sequence[int] = (1, 5, 10, 20), steps: int = 20) -> tuple[Setting, ...]:
    """EOT-FGSM with the most draws, and EOT-PGD with steps of a quarter of the budget at each number of draws."""
    fgsm = Setting(f"eot-fgsm-{max(samples)}", "eot-fgsm", {"samples": max(samples)})
    return (fgsm, *(Setting(f"eot-pgd-{n}", "eot-pgd", {"samples": n, "steps": steps}) for n in samples))


def stronger(samples: int = 20, steps: int = 100) -> tuple[Setting, ...]:
    """More steps, momentum, restarts, both averages, Auto-PGD on two losses, and search without gradients."""
    long = {"samples": samples, "steps": steps}
    search = {"queries": max(60, samples * steps)}
    return (
        Setting("eot-pgd-long", "eot-pgd", {**long, "restarts": 2}),
        Setting("eot-pgd-outputs", "eot-pgd", {**long, "momentum": 0.75, "average": "outputs"}),
        *(Setting(f"eot-apgd-{loss}", "eot-apgd", {**long, "loss": loss}) for loss in ("ce", "margin")),
        Setting("eot-square", "eot-square", {**search, "samples": 10, "restarts": 2}),
    )


@dataclass(frozen=True, eq=False, repr=False)
class GridResult(Shown):
    """What each setting leaves of a random model.

    Attributes:
        names: of the settings.
        accuracy: left by each setting, by its own votes (20 as published), in the same order.
        confirmed: left by each setting if only examples count that 100 fresh draws confirm; a batch may share the
            votes of a setting, so that luck can break many inputs at once.
        clean: share of the inputs that the mean softmax classifies right.
        minimum: share of the inputs that no setting breaks by confirmed examples, at most each of `confirmed`.
        held: (B,) bool, which inputs these are.
        by: (B,) first setting that broke each input; "clean" for a wrong one, "" for one that held.
    """

    names: tuple[str, ...]
    accuracy: tuple[float, ...]
    confirmed: tuple[float, ...]
    clean: float
    minimum: float
    held: Tensor
    by: tuple[str, ...]


@torch.no_grad()
def eot_grid_of(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat | str,
    settings: Sequence[Setting] | None = None,
    *,
    seed: int = 0,
    chunk: int = 256,
) -> GridResult:
    """Run every setting on every input that the model classifies right, and take the minimum over all.

    The attack "eot-grid" gives only the minimum, and is faster: there a broken input is attacked no further.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode; random or not.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        settings: `published()` and `stronger()` if none are given; names must differ.
        seed: fixes every random choice.
        chunk: inputs that share a batch, and so draws.
    """
    threat, settings = read_threat(threat), (*published(), *stronger()) if settings is None else tuple(settings)
    check_task(model, x, y, threat)
    if not settings or len({setting.name for setting in settings}) < len(settings) or chunk < 1:
        raise InputError("give at least one setting, each with a name of its own, and chunk >= 1")
    right = torch.cat([mean_prediction(model, part, CONFIRMED, seed) for part in x.split(chunk)]).argmax(1) == y
    rows, by = right.nonzero()[:, 0], ["" if r else "clean" for r in right.tolist()]
    held, accuracy, confirmed = right.clone(), [], []
    parts = rows.split(chunk) if len(rows) else ()
    for number, setting in enumerate(settings):
        found = [_run(setting, model, x, y, threat, part, seed) for part in parts]
        broken = sum(int(result.success.sum()) for result in found)
        accuracy.append((len(rows) - broken) / len(x))
        lost = [
            part[_confirmed(model, result, y[part], seed + number + 1)]
            for part, result in zip(parts, found, strict=True)
        ]
        for i in torch.cat(lost).tolist() if lost else []:
            by[i] = by[i] or setting.name
            held[i] = False
        confirmed.append((len(rows) - sum(map(len, lost))) / len(x))
    share = float(right.double().mean()), float(held.double().mean())
    names = tuple(setting.name for setting in settings)
    return GridResult(names, tuple(accuracy), tuple(confirmed), *share, held, tuple(by))


def _run(
    setting: Setting, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, rows: Tensor, seed: int
) -> AttackResult:
    record = get("attack", setting.method)
    options = record.check(threat, dict(setting.options))
    noise = noise_for(x, seed, None)[rows]
    result: AttackResult = record.function(model, x[rows], y[rows], threat, noise=noise, **options)
    return result


def _confirmed(model: nn.Module, result: AttackResult, y: Tensor, seed: int, votes: int = CONFIRMED) -> Tensor:
    """(B,) bool: is the example misclassified by draws that the attack has not seen?"""
    fooled, rows = result.success.clone(), result.success.nonzero()[:, 0]
    if len(rows):
        fooled[rows] = mean_prediction(model, result.x_adv[rows], votes, seed).argmax(1) != y[rows]
    return fooled


@Attack(
    "eot-grid",
    summary="random models: published and stronger settings of EOT one after another, each on the survivors",
    threats=("linf", "l2"),
    reference="Holdfast; Athalye et al., Synthesizing robust adversarial examples, 2018; Lee et al., GradDiv, 2022",
    stochastic=True,
)
@on_task
def eot_grid(task: Task, *, samples: Count = 20, steps: Count = 100, votes: Count = CONFIRMED) -> AttackResult:
    """Break what any setting breaks, if fresh draws confirm the example; `by` names the setting.

    EOT-FGSM and EOT-PGD as published, then long runs with restarts and momentum, the gradient of the mean output,
    Auto-PGD on two losses, and search without gradients; see `eot_grid_of` for the accuracy under each.

    Args:
        samples: draws for each gradient of the stronger settings, 100 where the randomness is high; the published
            ones take 1, 5, 10 and 20, if these are not more.
        steps: gradient steps of the stronger settings; the published ones take 20 at most.
        votes: draws that decide whether an example counts.
    """
    model, x, y, threat, noise = task
    numbers = [n for n in (1, 5, 10, 20) if n <= samples]
    settings = (*published(numbers, min(20, steps)), *stronger(samples, steps))

    def run(number: int, setting: Setting) -> Stage:
        record = get("attack", setting.method)
        options = record.check(threat, dict(setting.options))

        def stage(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
            found: AttackResult = record.function(model, x, y, threat, noise=noise.fork(number), **options)
            fooled = _confirmed(model, found, y, noise.seed + number + 1, votes)
            queries = found.queries + votes * found.success
            return AttackResult(found.x_adv, fooled, broken_by(setting.name, fooled), found.gradients, queries)

        return stage

    return run_stages(x, y, noise, [run(number, setting) for number, setting in enumerate(settings)])


def weaker_with_more_draws(accuracy: dict[int, float], inputs: int) -> list[tuple[int, int]]:
    """Pairs (fewer, more) draws where more of them leave more accuracy than chance explains: a sign of a weak attack.

    Args:
        accuracy: by number of draws, on the same inputs.
        inputs: how many there are; two standard errors of the difference are chance.
    """
    found, counts = [], sorted(accuracy)
    for fewer, more in pairwise(counts):
        p = (accuracy[fewer] + accuracy[more]) / 2
        if accuracy[more] - accuracy[fewer] > 2 * math.sqrt(2 * p * (1 - p) / inputs):
            found.append((fewer, more))
    return found
