"""How good is the model now? Accuracy on inputs held out of training, with and without a small attack."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS
from holdfast.attacks.pgd import pgd
from holdfast.certificates import certify
from holdfast.random import Noise
from holdfast.threats import Threat
from holdfast.training.context import in_mode
from holdfast.training.workers import Workers

SINGLE_STEP_SIZE = 1.25  # in units of the budget, as in training with one step from a random start


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

    Each process takes its share of the inputs; the answer depends neither on their number nor on the batch size.

    Args:
        model: on any device; evaluated in eval mode and left as it came.
        x: inputs (N, ...).  y: labels (N,).
        threat: threat of the attack, at its full budget.
        attack_steps: steps of PGD; 0 for no attack.
        batch_size: inputs at a time.
        seed: seed of the attack's random starts.
        team: the processes of the run.
        certificate: name of the proof; "none" for none.
        view: (x, noise) -> x with noise, or with parts of it ablated.
    """
    place = next(model.parameters())
    attacked = threat is not None and attack_steps > 0 and threat.name in BALLS
    proved = threat is not None and certificate != "none"
    clean = robust = single = certified = noisy = 0
    with in_mode(model, False), torch.no_grad():
        for index in torch.arange(len(x))[team.rank :: team.count].split(batch_size):
            inputs, labels = x[index].to(place), y[index].to(place.device)
            right = model(inputs).argmax(1) == labels
            clean += int(right.sum())
            if view is not None:
                seen = view(inputs, Noise(seed, index.to(place.device)).fork(0))
                noisy += int((model(seen).argmax(1) == labels).sum())
            if proved and threat is not None:
                certified += int(certify(model, inputs, labels, threat, certificate).certified.sum())
            if attacked and threat is not None and bool(right.any()):
                noise = Noise(seed, index.to(place.device))[right]
                broken = pgd(model, inputs[right], labels[right], threat, noise=noise, steps=attack_steps).success
                robust += int((~broken).sum())
                if single_step:
                    size = SINGLE_STEP_SIZE * threat.budget
                    once = pgd(model, inputs[right], labels[right], threat, noise=noise, steps=1, step_size=size)
                    single += int((~once.success).sum())
    names = ("clean", "robust", "single", "certified", "noisy")
    shown = (True, attacked, attacked and single_step, proved, view is not None)
    totals = team.total([clean, robust, single, certified, noisy])
    return {name: total / len(x) for name, total, show in zip(names, totals, shown, strict=True) if show}
