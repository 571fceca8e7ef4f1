"""SPSA: Adam on gradients that random signs estimate; it uses only the model's outputs."""

import torch
from torch import Tensor

from holdfast.attacks.core.estimate import Direction, Estimate, climb_estimate, steps_within
from holdfast.attacks.core.forms import Task, on_task
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.utils.options import Count, Positive

_BETA_1, _BETA_2, _TINY = 0.9, 0.999, 1e-8  # Adam's own, as in the paper


def rademacher(noise: Noise, count: int, x: Tensor) -> Tensor:
    """Random signs, shape (B, count, ...); every bit of a 64-bit draw is one of them."""
    size = x[0].numel()
    words = noise.bits((count, -(-size // 64)))
    bits = (words[..., None] >> torch.arange(64, device=x.device)) & 1
    return (2 * bits.flatten(2)[..., :size].to(x.dtype) - 1).view(len(x), count, *x.shape[1:])


def _adam(x: Tensor) -> Direction:
    """Adam's direction for each input of the batch x (B, ...); it remembers the moments of the gradients it saw."""
    # Squares of gradients, and Adam's small constant, underflow in half precision.
    mean = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    square = torch.zeros_like(mean)

    def direction(gradient: Tensor, x_adv: Tensor, row: Tensor, step: int) -> Tensor:
        gradient = gradient.to(mean)
        m = mean[row] = _BETA_1 * mean[row] + (1 - _BETA_1) * gradient
        v = square[row] = _BETA_2 * square[row] + (1 - _BETA_2) * gradient**2
        root = (v / (1 - _BETA_2 ** (step + 1))).sqrt() + _TINY
        return (m / (1 - _BETA_1 ** (step + 1)) / root).to(x_adv)

    return direction


@Attack(
    "spsa",
    summary="Adam on gradients estimated from random signs: needs no gradient",
    threats=("linf", "l2"),
    reference="Uesato et al., Adversarial risk and the dangers of evaluating against weak attacks, 2018",
    gradients="none",
)
@on_task
def spsa(
    task: Task,
    *,
    steps: Count = 100,
    samples: Count = 128,
    delta: Positive = 0.01,
    step_size: Positive = 0.01,
    queries: Count | None = None,
    chunk: Count = 2048,
) -> AttackResult:
    """Run projected Adam on the margin, with its gradient estimated by simultaneous perturbation.

    With random signs v the estimate is the mean of (f(x + delta v) - f(x - delta v)) / (2 delta) v. It sees through
    gradients that are masked or zero, as long as f changes at the scale of delta. The paper uses up to 8192 samples.

    Args:
        steps: steps of Adam.
        samples: forward passes for one estimate, two for each direction.
        delta: distance of the probes from the iterate, per value.
        step_size: learning rate of Adam, in the unit of the input's values.
        queries: most forward passes on one input; whole steps are left out to keep to it.
        chunk: probes in one forward pass, about; memory grows with it, the answer does not change.
    """
    steps = steps_within(steps, samples, queries)
    estimate = Estimate(rademacher, samples // 2, delta, chunk)
    return climb_estimate(task, estimate, direction=_adam(task.x), step_size=step_size, steps=steps, name="spsa")
