"""NES: projected ascent on gradients that Gaussian probes estimate; it uses only the model's outputs."""

from torch import Tensor

from holdfast.attacks.core.ascent import steepest
from holdfast.attacks.core.estimate import Estimate, climb_estimate, steps_within
from holdfast.attacks.core.forms import Task, on_task
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.utils.options import Count, Positive


def gaussian(noise: Noise, count: int, x: Tensor) -> Tensor:
    """Standard normal directions, shape (B, count, ...)."""
    return noise.normal((count, *x.shape[1:]), x.dtype)


@Attack(
    "nes",
    summary="projected ascent on gradients estimated by natural evolution strategies: needs no gradient",
    threats=("linf", "l2"),
    reference="Ilyas et al., Black-box adversarial attacks with limited queries and information, 2018",
    gradients="none",
)
@on_task
def nes(
    task: Task,
    *,
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
        steps: steps of ascent.
        samples: forward passes for one estimate, two for each direction.
        sigma: standard deviation of the probes, per value.
        step_size: in the threat's own unit; 2.5 * budget / steps if none is given.
        queries: most forward passes on one input; whole steps are left out to keep to it.
        chunk: probes in one forward pass, about; memory grows with it, the answer does not change.
    """
    steps = steps_within(steps, samples, queries)
    step_size = 2.5 * task.threat.budget / steps if step_size is None else step_size
    estimate = Estimate(gaussian, samples // 2, sigma, chunk)

    def direction(gradient: Tensor, x_adv: Tensor, row: Tensor, step: int) -> Tensor:
        return steepest(task.threat, gradient, x_adv, 0.0)

    return climb_estimate(task, estimate, direction=direction, step_size=step_size, steps=steps, name="nes")
