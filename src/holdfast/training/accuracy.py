"""How good is the model now? Accuracy on inputs held out of training, with and without a small attack."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.attacks.core.chance import is_stochastic, mean_prediction
from holdfast.attacks.eot import eot_pgd
from holdfast.attacks.pgd import pgd
from holdfast.certificates import certify
from holdfast.models.random import DRAWS
from holdfast.random import Noise
from holdfast.threats import Threat
from holdfast.training.context import in_mode
from holdfast.training.workers import Workers

SINGLE_STEP_SIZE = 1.25  # in units of the budget, as in training with one step from a random start
SAMPLES = 5
"""Draws for each gradient of the attack on a random model; its validation is no more than a choice between epochs."""


def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat | None,
    *,
    attack_steps: int,
    batch_size: int,
    seed: int,
    team: Workers,
    single_step: bool = False,
    certificate: str = "none",
    view: Callable[[Tensor, Noise], Tensor] | None = None,
) -> dict[str, float]:
    """Fractions of the inputs classified right: "clean", "robust" under PGD if there is a threat, and "certified".

    With `single_step` also "single", under one step from a random start: where that is far above "robust", the model
    has learned to resist only one step. With `view` also "noisy", at what a smoothed classifier would see.

    Each process takes its share of the inputs; the answer depends neither on their number nor on the batch size. The
    threat is taken at its full budget. The model is evaluated in eval mode and left as it came.

    A model that draws random numbers answers with its mean softmax over 20 draws, and the attack averages over draws;
    a batch may share them, so that its size then matters. torch's generators are left as they were.
    """
    place = next(model.parameters())
    attacked = threat is not None and attack_steps > 0 and threat.name in BALLS
    proved = threat is not None and certificate != "none"
    clean = robust = single = certified = noisy = 0
    with in_mode(model, False), torch.no_grad():
        by_chance = is_stochastic(model, x[:2].to(place))
        for index in torch.arange(len(x))[team.rank :: team.count].split(batch_size):
            inputs, labels = x[index].to(place), y[index].to(place.device)
            right = (mean_prediction(model, inputs, DRAWS, seed) if by_chance else model(inputs)).argmax(1) == labels
            clean += int(right.sum())
            if view is not None:
                seen = view(inputs, Noise(seed, index.to(place.device)).fork(0))
                noisy += int((model(seen).argmax(1) == labels).sum())
            if proved and threat is not None:
                certified += int(certify(model, inputs, labels, threat, certificate).certified.sum())
            if attacked and threat is not None and bool(right.any()):
                noise = Noise(seed, index.to(place.device))[right]
                held = partial(_held, model, inputs[right], labels[right], threat, noise, by_chance)
                robust += held(attack_steps, 2.5 * threat.budget / attack_steps)
                if single_step:
                    single += held(1, SINGLE_STEP_SIZE * threat.budget)
    names = ("clean", "robust", "single", "certified", "noisy")
    shown = (True, attacked, attacked and single_step, proved, view is not None)
    totals = team.total([clean, robust, single, certified, noisy])
    return {name: total / len(x) for name, total, show in zip(names, totals, shown, strict=True) if show}


def _held(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise, by_chance: bool, steps: int, size: float
) -> int:
    """Inputs that PGD does not break, on the gradient averaged over draws if the model draws random numbers."""
    if by_chance:
        run = eot_pgd(model, x, y, threat, noise=noise, steps=steps, step_size=size, samples=SAMPLES)
    else:
        run = pgd(model, x, y, threat, noise=noise, steps=steps, step_size=size)
    return int((~run.success).sum())
