"""NES: projected ascent on gradients that Gaussian probes estimate; it uses only the model's outputs."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import steepest
from holdfast.attacks.core.estimate import Estimate, climb_estimate, steps_within
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Threat
from holdfast.utils.options import Count, Positive


def gaussian(noise: Noise, count: int, x: Tensor) -> Tensor:
    """Standard normal directions, shape (B, count, ...)."""
    return noise.normal((count, *x.shape[1:]), x.dtype)


@register(
    Attack(
        "nes",
        summary="projected ascent on gradients estimated by natural evolution strategies: needs no gradient",
        threats=("linf", "l2"),
        reference="Ilyas et al., Black-box adversarial attacks with limited queries and information, 2018",
        gradients="none",
    )
)
@torch.no_grad()
def nes(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: Count = 100,
    samples: Count = 50,
    sigma: Positive = 0.001,
    step_size: Positive | None = None,
    queries: Count | None = None,
    chunk: Count = 2048,
) -> AttackResult:
    """Run projected steepest ascent on the margin, with its gradient estimated from antithetic Gaussian probes.

    With normal v the estimate is the mean of (f(x + sigma v) - f(x - sigma v)) / (2 sigma) v. Where the model rounds
    its input, choose a sigma above the width of the rounding.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: Linf or L2.
        noise: source of the directions; seed 0 for inputs 0 ... B-1 if none is given.
        steps: steps of ascent.
        samples: forward passes for one estimate, two for each direction.
        sigma: standard deviation of the probes, per value.
        step_size: in the threat's own unit; 2.5 * budget / steps if none is given.
        queries: most forward passes on one input; whole steps are left out to keep to it.
        chunk: probes in one forward pass, about; memory grows with it, the answer does not change.
    """
    steps = steps_within(steps, samples, queries)
    step_size = 2.5 * threat.budget / steps if step_size is None else step_size
    noise = noise or Noise.for_batch(0, len(x), x.device)
    estimate = Estimate(gaussian, samples // 2, sigma, chunk)

    def direction(gradient: Tensor, x_adv: Tensor, row: Tensor, step: int) -> Tensor:
        return steepest(threat, gradient, x_adv, 0.0)

    task = (model, x, y, threat, noise)
    return climb_estimate(*task, estimate=estimate, direction=direction, step_size=step_size, steps=steps, name="nes")
