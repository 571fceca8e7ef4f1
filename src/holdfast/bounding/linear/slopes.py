"""Which line below a ReLU: fixed, random, or chosen for the input at hand.

Below an unstable ReLU every line through 0 with a slope in [0, 1] is sound (for a leaky ReLU in [its slope, 1]), so the
slopes are free to serve tightness, or smoothness of the loss in the weights. The rules here give lower slopes by node,
(B, 1, *shape), the same for all rows of an input, to be passed to `linear.margin_bounds`; stable neurons keep the exact
line, and activations that are not piecewise linear keep their own.

(Lee, Lee, Park and Lee, "Towards better understanding of training certifiably robust models against adversarial
examples", 2021: with bounds of the hidden layers by intervals, these rules are that paper's CAP-IBP, RANDOM, the
variants (p, q) of CROWN-IBP, and its own, which takes one signed gradient step.)
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from holdfast.bounding.graph import ops
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relax import PIECEWISE
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.errors import InputError
from holdfast.random import Noise

LowerSlopes = dict[int, Tensor]
"""Lower slopes (B, 1, *shape) by node."""


def _piecewise(r: Relaxation) -> dict[int, tuple[ops.Activation, Tensor, Tensor]]:
    """The piecewise linear activations by node, with the bounds of their inputs."""
    found = {}
    for i, node in enumerate(r.graph.nodes):
        if isinstance(node.op, ops.Activation) and node.op.kind in PIECEWISE and i in r.lines:
            found[i] = (node.op, *r.intervals[node.inputs[0]])
    return found


def pre_activations(r: Relaxation) -> dict[int, tuple[Tensor, Tensor]]:
    """Bounds (B, n) before every ReLU, by node."""
    return {
        i: (r.intervals[node.inputs[0]][0].flatten(1), r.intervals[node.inputs[0]][1].flatten(1))
        for i, node in enumerate(r.graph.nodes)
        if isinstance(node.op, ops.Activation) and node.op.kind == "relu"
    }


def _chosen(r: Relaxation, rule: Callable[[int, ops.Activation, Tensor, Tensor], Tensor]) -> LowerSlopes:
    """What `rule(node, activation, l, u)` gives on unstable neurons, the exact slope on the others; detached."""
    chosen = {}
    for i, (op, lower, upper) in _piecewise(r).items():
        free = (lower < 0) & (upper > 0)
        slope = torch.where(free, rule(i, op, lower, upper), r.lines[i].lower_slope)
        chosen[i] = slope.detach()[:, None]
    return chosen


def chord_slopes(r: Relaxation) -> LowerSlopes:
    """The slope of the chord, u / (u - l): both lines parallel. "CAP-IBP" on interval bounds."""
    return _chosen(r, lambda i, op, lower, upper: r.lines[i].upper_slope)


def random_slopes(r: Relaxation, *, noise: Noise) -> LowerSlopes:
    """Uniform on [0, 1], drawn for every neuron of every input. "RANDOM"."""

    def rule(i: int, op: ops.Activation, lower: Tensor, upper: Tensor) -> Tensor:
        drawn = noise.fork(i).uniform(lower.shape[1:], lower.dtype)
        return op.parameter + (1 - op.parameter) * drawn

    return _chosen(r, rule)


def bernoulli_slopes(r: Relaxation, p: float, q: float, *, noise: Noise) -> LowerSlopes:
    """Slope 1 with probability p where |l| > |u|, with probability q elsewhere; else 0. (0, 1) is CROWN-IBP's rule.

    Few slopes of 1 make the loss smoother in the weights and the bound looser.
    """
    if not (0 <= p <= 1 and 0 <= q <= 1):
        raise InputError(f"p and q are probabilities, between 0 and 1; got p={p}, q={q}")

    def rule(i: int, op: ops.Activation, lower: Tensor, upper: Tensor) -> Tensor:
        chance = torch.where(-lower > upper, torch.full_like(lower, p), torch.full_like(lower, q))
        one = noise.fork(i).uniform(lower.shape[1:], lower.dtype) < chance
        return torch.where(one, torch.ones_like(lower), torch.full_like(lower, op.parameter))

    return _chosen(r, rule)


def optimised_slopes(r: Relaxation, y: Tensor, *, noise: Noise, steps: int = 1, step_size: float = 2.0) -> LowerSlopes:
    """Signed gradient steps on the certified loss of each input, from random slopes, clipped to [0, 1].

    With one step of size >= 1 every slope that matters ends at 0 or 1. Several steps (the paper tries 7 of size 0.1)
    gain little. The slopes are detached: a second pass with them carries gradients only through the bounds and
    the upper lines.

    Args:
        r: the relaxed network.  y: labels (B,).
        noise: for the starting slopes.
        steps: gradient steps; each costs a backward bound and its gradient.
        step_size: change of a slope per step.
    """
    if steps < 1 or step_size <= 0:
        raise InputError(f"steps must be >= 1 and step_size > 0, got steps={steps}, step_size={step_size}")
    slopes = random_slopes(r, noise=noise)
    for _ in range(steps if slopes else 0):
        gradients = _slope_gradients(r, y, slopes)
        moved = {i: slopes[i][:, 0] - step_size * gradients[i].sign()[:, 0] for i in slopes}
        slopes = _chosen(r, lambda i, op, lower, upper: moved[i].clamp(op.parameter, 1.0))  # noqa: B023
    return slopes


def _slope_gradients(r: Relaxation, y: Tensor, slopes: LowerSlopes) -> LowerSlopes:
    """Gradient of each input's certified loss in its slopes; zero where no positive coefficient meets the neuron."""
    with torch.enable_grad():
        free = {i: slope.requires_grad_() for i, slope in slopes.items()}
        loss = cross_entropy(-linear.margin_bounds(r, y, free), y, reduction="sum")
        gradients = torch.autograd.grad(loss, list(free.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(free, gradients, strict=True))
