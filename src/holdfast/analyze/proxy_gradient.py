"""How good must a stand-in for the gradient be? PGD along vectors at a fixed angle to the true gradient.

To first order a step of length a along a unit vector at the angle theta to the gradient G raises the loss by
a |G| cos(theta). With an l2 step that is exact; the signs of an Linf step follow the law only roughly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.ascent import steepest
from holdfast.attacks.core.batches import noise_for
from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import cross_entropy as loss_of
from holdfast.attacks.eot import proxy_gradient
from holdfast.checks import check_task
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.threats import L2, Linf, Threat
from holdfast.threats import threat as read_threat
from holdfast.utils.show import Shown

ANGLES = tuple(range(0, 91, 10))


@dataclass(frozen=True, eq=False, repr=False)
class ProxyStudy(Shown):
    """What PGD reaches along proxies of the gradient.

    Attributes:
        degrees: angles between proxy and gradient, (T,).
        rise: (T, B) how much the loss of each input rises.
        accuracy: (T,) share of the inputs that are classified right at the end.
    """

    degrees: tuple[float, ...]
    rise: Tensor
    accuracy: tuple[float, ...]

    @property
    def relative(self) -> list[float]:
        """Mean rise of the loss at each angle as a share of the rise at the first; cos(theta) to first order."""
        means = self.rise.double().mean(1)
        return (means / means[0]).tolist()


@torch.no_grad()
def proxy_study(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat | str,
    *,
    degrees: Sequence[float] = ANGLES,
    steps: int = 20,
    step_size: float | None = None,
    seed: int = 0,
) -> ProxyStudy:
    """Run PGD from x along proxies at each angle to the gradient; the direction around it is drawn anew at each step.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an l2 ball, on which the cosine law holds to first order, or an Linf ball.
        degrees: angles between 0 and 90.
        steps: of each run.
        step_size: in the threat's own unit; a quarter of the budget if none is given.
        seed: fixes the directions.
    """
    threat = read_threat(threat)
    if not isinstance(threat, L2 | Linf):
        raise InputError(f"the study of proxies takes an l2 or an Linf ball, got '{threat}'")
    if not degrees or not all(0 <= angle <= 90 for angle in degrees) or steps < 1:
        raise InputError(f"give angles between 0 and 90 degrees and steps >= 1, got {list(degrees)} and {steps}")
    before = cross_entropy(check_task(model, x, y, threat), y, reduction="none")
    size, rises, accuracy = threat.budget / 4 if step_size is None else step_size, [], []
    noise = noise_for(x, seed, None)
    for angle in degrees:
        x_adv = x
        with frozen(model):
            for step in range(steps):
                gradient, _, _ = input_gradient(model, x_adv, y, loss_of)
                proxy = _proxy(gradient, math.radians(angle), noise.fork(step))
                x_adv = threat.project(x_adv + size * steepest(threat, proxy, x_adv, 0.0), x)
        logits = model(x_adv)
        rises.append(cross_entropy(logits, y, reduction="none") - before)
        accuracy.append(float((logits.argmax(1) == y).double().mean()))
    return ProxyStudy(tuple(map(float, degrees)), torch.stack(rises), tuple(accuracy))


def _proxy(gradient: Tensor, theta: float, noise: Noise) -> Tensor:
    """The proxies of the gradients that are not zero; zero for the others."""
    alive = (gradient.flatten(1) != 0).any(1)
    proxy = torch.zeros_like(gradient)
    if bool(alive.any()):
        proxy[alive] = proxy_gradient(gradient[alive], theta, noise[alive])
    return proxy
