"""Gradient ascent on gradients that are estimated from the model's outputs: what SPSA and NES share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.attacks.core.forms import Task
from holdfast.attacks.core.losses import margin
from holdfast.attacks.core.survivors import Survivors
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.results import AttackResult
from holdfast.utils import clock

Draw = Callable[[Noise, int, Tensor], Tensor]
Direction = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""From the estimated gradient and the iterate (R, ...), the rows (R,) in the batch and the step to a direction."""

_DIRECTIONS = 8  # directions per draw: fixed, so that the order of the sums does not depend on the batch


@dataclass(frozen=True, eq=False)
class Estimate:
    """How to estimate a gradient: `directions` from `draw`, probed at a distance of `delta` on both sides."""

    draw: Draw
    directions: int
    delta: float
    chunk: int

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, noise: Noise) -> Tensor:
        """Mean over directions v of (f(x + delta v) - f(x - delta v)) / (2 delta) v, f the margin; shape of x."""
        rows = max(1, self.chunk // (2 * _DIRECTIONS))
        parts = range(0, len(x), rows)
        return torch.cat([self._part(model, x[i : i + rows], y[i : i + rows], noise[i : i + rows]) for i in parts])

    def _part(self, model: nn.Module, x: Tensor, y: Tensor, noise: Noise) -> Tensor:
        total = torch.zeros_like(x)
        for first in range(0, self.directions, _DIRECTIONS):
            if clock.over():
                break
            count = min(_DIRECTIONS, self.directions - first)
            v = self.draw(noise.fork(first), count, x)
            step = self.delta * v
            probes = torch.stack([x[:, None] + step, x[:, None] - step])
            values = margin(model(probes.flatten(0, 2)), y.repeat(2, 1).repeat_interleave(count, 1).flatten())
            plus, minus = values.view(2, len(x), count)
            slopes = (plus - minus) / (2 * self.delta)
            for k in range(count):
                total += slopes[:, k].view(-1, *[1] * (x.ndim - 1)) * v[:, k]
        return total / self.directions


def climb_estimate(
    task: Task, estimate: Estimate, *, direction: Direction, step_size: float, steps: int, name: str
) -> AttackResult:
    """Go up the margin from x; an input is done at its first misclassified iterate, and leaves with its group."""
    model, x, y, threat, noise = task
    s, x_adv = Survivors(x, y), x
    for step in range(steps + 1):
        s.count()
        logits = model(x_adv)
        s.keep(x_adv, margin(logits, s.y), logits.argmax(1) != s.y)
        if step == steps or s.over:
            break
        (x_adv,) = s.leave(x_adv)
        s.count(queries=2 * estimate.directions)
        gradient = estimate(model, x_adv, s.y, noise[s.row].fork(step))
        x_adv = threat.project(x_adv + step_size * direction(gradient, x_adv, s.row, step), s.x)
    return s.result(name)


def steps_within(steps: int, samples: int, queries: int | None) -> int:
    """Steps that `queries` allow: one look at each iterate, the start included, and `samples` probes between them."""
    if samples % 2:
        raise InputError(f"samples come in pairs: give an even number of at least 2, got {samples}")
    if queries is None:
        return steps
    if queries < samples + 2:
        raise InputError(
            f"queries={queries} do not allow one step: it takes {samples} samples and a look at the points before and "
            f"after it. Give at least {samples + 2}, or fewer samples."
        )
    return min(steps, (queries - 1) // (samples + 1))
