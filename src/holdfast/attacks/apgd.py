"""The three registered forms of Auto-PGD: on the cross-entropy, on the difference of logits ratio, and targeted."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.attacks.core.auto_pgd import auto_pgd
from holdfast.attacks.core.losses import cross_entropy, dlr, likely_targets, targeted_dlr
from holdfast.attacks.core.stages import run_restarts, run_targets
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Threat
from holdfast.utils.options import Count

_REFERENCE = (
    "Croce and Hein, Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free "
    "attacks, 2020"
)


def _untargeted(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise | None, restarts: int, **options: Any
) -> AttackResult:
    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart))
        return auto_pgd(model, x, y, threat, x_start, **options)

    noise = noise or Noise.for_batch(0, len(x), x.device)
    return run_restarts(x, y, noise, restarts, run)


@register(
    Attack(
        "apgd-ce",
        summary="Auto-PGD on the cross-entropy: sets its own step size",
        threats=BALLS,
        reference=_REFERENCE,
    )
)
@torch.no_grad()
def apgd_ce(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: Count = 100,
    restarts: Count = 1,
    samples: Count = 1,
) -> AttackResult:
    """Run Auto-PGD on the cross-entropy, from a random point; restarts run on the survivors only.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball or a Box.
        noise: source of the random starts; seed 0 for inputs 0 ... B-1 if none is given.
        steps: gradient steps of each run.
        restarts: runs in all; the first one included.
        samples: passes averaged at each point, for models that draw random numbers; AutoAttack takes 20.
    """
    options = {"loss": cross_entropy, "steps": steps, "samples": samples, "name": "apgd-ce"}
    return _untargeted(model, x, y, threat, noise, restarts, **options)


@register(
    Attack(
        "apgd-dlr",
        summary="Auto-PGD on the difference of logits ratio, which no scale of the logits can mask",
        threats=BALLS,
        reference=_REFERENCE,
    )
)
@torch.no_grad()
def apgd_dlr(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: Count = 100,
    restarts: Count = 1,
    samples: Count = 1,
) -> AttackResult:
    """Run Auto-PGD on the difference of logits ratio (`losses.dlr`); arguments as for `apgd-ce`."""
    options = {"loss": dlr, "steps": steps, "samples": samples, "name": "apgd-dlr"}
    return _untargeted(model, x, y, threat, noise, restarts, **options)


@register(
    Attack(
        "apgd-t",
        summary="Auto-PGD on the targeted difference of logits ratio, one likely class after another",
        threats=BALLS,
        reference=_REFERENCE,
    )
)
@torch.no_grad()
def apgd_t(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: Count = 100,
    restarts: Count = 1,
    targets: Count = 9,
    samples: Count = 1,
) -> AttackResult:
    """Run Auto-PGD towards each of the `targets` classes with the highest clean logits, each on the survivors so far.

    Arguments as for `apgd-ce`; `restarts` runs for each target. K classes have at most K - 1 targets.
    """
    noise = noise or Noise.for_batch(0, len(x), x.device)
    ranked = likely_targets(model(x), y, targets)

    def run(number: int, x: Tensor, y: Tensor, noise: Noise, target: Tensor) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(number))
        options: dict[str, Any] = {"loss": targeted_dlr, "steps": steps, "samples": samples, "name": "apgd-t"}
        return auto_pgd(model, x, y, threat, x_start, target=target, **options)

    numbers = range(ranked.shape[1] * restarts)
    return run_targets(x, y, noise, ranked, [(n // restarts, partial(run, n)) for n in numbers])
