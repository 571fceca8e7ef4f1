"""Gradient ascent on estimated gradients: SPSA and NES use only the model's outputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.attacks.core.losses import margin
from holdfast.attacks.core.stages import group_size, survivors
from holdfast.attacks.pgd import steepest
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Threat

Draw = Callable[[Noise, int, Tensor], Tensor]

_DIRECTIONS = 8  # directions per draw: fixed, so that the order of the sums does not depend on the batch
_BETA_1, _BETA_2, _TINY = 0.9, 0.999, 1e-8  # Adam's own, as in the paper


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


def rademacher(noise: Noise, count: int, x: Tensor) -> Tensor:
    """Random signs, shape (B, count, ...); every bit of a 64-bit draw is one of them."""
    size = x[0].numel()
    words = noise.bits((count, -(-size // 64)))
    bits = (words[..., None] >> torch.arange(64, device=x.device)) & 1
    return (2 * bits.flatten(2)[..., :size].to(x.dtype) - 1).view(len(x), count, *x.shape[1:])


def gaussian(noise: Noise, count: int, x: Tensor) -> Tensor:
    """Standard normal directions, shape (B, count, ...)."""
    return noise.normal((count, *x.shape[1:]), x.dtype)


def _ascend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    noise: Noise,
    *,
    estimate: Estimate,
    adam: bool,
    step_size: float,
    steps: int,
    name: str,
) -> AttackResult:
    """Projected ascent from x; an input is done at its first misclassified iterate, and leaves with its group."""
    group = group_size(len(x))
    found = x.clone()
    success = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    queries = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    row = torch.arange(len(x), device=x.device)
    x_adv, best, best_loss, done = x, x, x.new_full((len(x),), -torch.inf), success
    # Squares of gradients, and Adam's small constant, underflow in half precision.
    mean = square = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for step in range(steps + 1):
        queries[row] += ~done
        logits = model(x_adv)
        loss, wrong = margin(logits, y), logits.argmax(1) != y
        better = ~done & (wrong | (loss > best_loss))
        best = torch.where(better.view(-1, *[1] * (x.ndim - 1)), x_adv, best)
        best_loss = torch.where(better, loss, best_loss)
        done = done | wrong
        if step == steps or bool(done.all()):
            break
        stay = survivors(done, group)
        if stay is not None:
            found[row], success[row] = best, done
            row, done, x, y, x_adv, best = (t[stay] for t in (row, done, x, y, x_adv, best))
            best_loss, mean, square, noise = best_loss[stay], mean[stay], square[stay], noise[stay]
        queries[row] += 2 * estimate.directions * ~done
        gradient = estimate(model, x_adv, y, noise.fork(step))
        if adam:
            gradient = gradient.to(mean)
            mean = _BETA_1 * mean + (1 - _BETA_1) * gradient
            square = _BETA_2 * square + (1 - _BETA_2) * gradient**2
            root = (square / (1 - _BETA_2 ** (step + 1))).sqrt() + _TINY
            direction = (mean / (1 - _BETA_1 ** (step + 1)) / root).to(x)
        else:
            direction = steepest(threat, gradient, x_adv, 0.0)
        x_adv = threat.project(x_adv + step_size * direction, x)
    found[row], success[row] = best, done
    by = tuple(name if broken else "" for broken in success.tolist())
    return AttackResult(found, success, by, torch.zeros_like(queries), queries)


def _steps_within(steps: int, samples: int, chunk: int, queries: int | None) -> int:
    """Steps that `queries` allow: one look at each iterate, the start included, and `samples` probes between them."""
    if steps < 1 or chunk < 1:
        raise InputError(f"steps and chunk must be at least 1, got {steps} and {chunk}")
    if samples < 2 or samples % 2:
        raise InputError(f"samples come in pairs: give an even number of at least 2, got {samples}")
    if queries is None:
        return steps
    if queries < samples + 2:
        raise InputError(
            f"queries={queries} do not allow one step: it takes {samples} samples and a look at the points before and "
            f"after it. Give at least {samples + 2}, or fewer samples."
        )
    return min(steps, (queries - 1) // (samples + 1))


def _check_lengths(**lengths: float) -> None:
    for name, value in lengths.items():
        if not value > 0:
            raise InputError(f"{name} must be above 0, got {value}")


@register(
    Attack(
        "spsa",
        summary="Adam on gradients estimated from random signs: needs no gradient",
        threats=("linf", "l2"),
        reference="Uesato et al., Adversarial risk and the dangers of evaluating against weak attacks, 2018",
        gradients="none",
    )
)
@torch.no_grad()
def spsa(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: int = 100,
    samples: int = 128,
    delta: float = 0.01,
    step_size: float = 0.01,
    queries: int | None = None,
    chunk: int = 2048,
) -> AttackResult:
    """Projected Adam ascent on the margin, its gradient estimated by simultaneous perturbation.

    With random signs v the estimate is the mean of (f(x + delta v) - f(x - delta v)) / (2 delta) v. It sees through
    gradients that are masked or zero, as long as f changes at the scale of delta. The paper uses up to 8192 samples.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: Linf or L2.
        noise: source of the random signs; seed 0 for inputs 0 ... B-1 if none is given.
        steps: steps of Adam.
        samples: forward passes for one estimate, two for each direction.
        delta: distance of the probes from the iterate, per value.
        step_size: learning rate of Adam, in the unit of the input's values.
        queries: most forward passes on one input; whole steps are left out to keep to it.
        chunk: probes in one forward pass, about; memory grows with it, the answer does not change.
    """
    _check_lengths(delta=delta, step_size=step_size)
    steps = _steps_within(steps, samples, chunk, queries)
    noise = noise or Noise.for_batch(0, len(x), x.device)
    estimate = Estimate(rademacher, samples // 2, delta, chunk)
    return _ascend(
        model, x, y, threat, noise, estimate=estimate, adam=True, step_size=step_size, steps=steps, name="spsa"
    )


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
    steps: int = 100,
    samples: int = 50,
    sigma: float = 0.001,
    step_size: float | None = None,
    queries: int | None = None,
    chunk: int = 2048,
) -> AttackResult:
    """Projected steepest ascent on the margin, its gradient estimated from antithetic Gaussian probes.

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
    _check_lengths(sigma=sigma, **({} if step_size is None else {"step_size": step_size}))
    steps = _steps_within(steps, samples, chunk, queries)
    step_size = 2.5 * threat.budget / steps if step_size is None else step_size
    noise = noise or Noise.for_batch(0, len(x), x.device)
    estimate = Estimate(gaussian, samples // 2, sigma, chunk)
    return _ascend(
        model, x, y, threat, noise, estimate=estimate, adam=False, step_size=step_size, steps=steps, name="nes"
    )
