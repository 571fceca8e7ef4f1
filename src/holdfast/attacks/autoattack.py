"""AutoAttack: an ensemble of attacks without parameters, each on what the ones before it left unbroken."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from holdfast.attacks.apgd import apgd_ce, apgd_dlr, apgd_t
from holdfast.attacks.core.chance import is_stochastic, mean_prediction, seeded
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.stages import Stage, run_stages
from holdfast.attacks.fab import fab, fab_t
from holdfast.attacks.fast.fold import folded
from holdfast.attacks.fast.lean import Lean
from holdfast.attacks.square import square
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Threat

Version = Literal["standard", "plus", "rand"]
Member = tuple[Any, dict[str, int]]
VERSIONS: dict[Version, list[Member]] = {
    "standard": [(apgd_ce, {}), (apgd_t, {}), (fab_t, {}), (square, {})],
    "plus": [
        (apgd_ce, {"restarts": 5}),
        (apgd_dlr, {"restarts": 5}),
        (fab, {"restarts": 5}),
        (square, {}),
        (apgd_t, {}),
        (fab_t, {}),
    ],
    "rand": [(apgd_ce, {"samples": 20}), (apgd_dlr, {"samples": 20})],
}
"""The published members in their order. Their budgets are the defaults: 100 steps, 9 targets, 5000 queries."""

VOTES = 100
"""Fresh draws that confirm an example against a model that draws random numbers."""


@Attack(
    "autoattack",
    summary="the published ensemble: APGD-CE, APGD-T, FAB-T and Square, each on the survivors",
    threats=("linf", "l2", "l1"),
    reference="Croce and Hein, Reliable evaluation of adversarial robustness with an ensemble of diverse "
    "parameter-free attacks, 2020",
    stochastic=True,
)
@on_task
def autoattack(task: Task, *, version: Version = "standard") -> AttackResult:
    """Run the members of a version in the published order and with the published budget; `by` names the successful one.

    "standard" is what tables report; `cascade` reaches the same figures in a fraction of the time where the gradients
    can be trusted. "plus" adds restarts and the untargeted forms. "rand" is for models that draw random numbers: it
    averages each gradient over 20 draws, and an example counts if the mean softmax of 100 fresh draws is fooled.
    """
    model, x, y, threat, noise = task
    if version == "rand":
        return random_model(model, x, y, threat, noise)
    if is_stochastic(model, x):
        raise InputError(
            f"the model draws random numbers, and version '{version}' cannot tell luck from an attack. "
            "Use version='rand', or 'eot-pgd', which average over draws."
        )

    fast = model if isinstance(model, Lean) else folded(model, x)

    def run(number: int, member: Member, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        function, options = member
        result: AttackResult = function(fast, x, y, threat, noise=noise.fork(number), **options)
        return result

    stages: list[Stage] = [partial(run, n, member) for n, member in enumerate(VERSIONS[version])]
    return run_stages(x, y, noise, stages)


def random_model(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise) -> AttackResult:
    """The version "rand": what each member breaks must fool fresh draws as well, or the input goes on."""

    def run(number: int, member: Member, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        function, options = member
        with seeded(noise.seed + number, x.device):
            found: AttackResult = function(model, x, y, threat, noise=noise.fork(number), **options)
        votes = mean_prediction(model, found.x_adv, VOTES, noise.seed + number + 1)
        fooled = votes.argmax(1) != y
        by = tuple(
            (name or function.__name__.replace("_", "-")) if f else ""
            for name, f in zip(found.by, fooled.tolist(), strict=True)
        )
        return replace(found, success=fooled, by=by, queries=found.queries + VOTES)

    return run_stages(x, y, noise, [partial(run, n, member) for n, member in enumerate(VERSIONS["rand"])])
