"""How tight is a Lipschitz bound? Pairs of inputs whose margins differ as much as possible for their distance.

A bound from the norms of the layers (`bounds.lipschitz`) can be far too large. Any two inputs give a lower bound, and
gradient ascent finds good ones; the ratio of the two says how much the certificate gives away (Leino, Wang and
Fredrikson, "Globally robust neural networks", 2021).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.bounding.lipschitz.constants import LipschitzBound
from holdfast.checks import check_inputs, check_logits, check_model, check_place, check_task
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.threats import L2
from holdfast.utils.show import Shown


@dataclass(frozen=True, eq=False, repr=False)
class LipschitzLower(Shown):
    """The steepest pair of inputs found from each start.

    Attributes:
        value: (B,) |m(x1) - m(x2)| / ||x1 - x2||, the margin being m = z_j - z_i: the constant of m is no less.
        classes: (B, 2) the j and i of that margin; j is the class predicted at x1, or at the centre of the ball.
        x1, x2: (B, ...) the inputs.
    """

    value: Tensor
    classes: Tensor
    x1: Tensor
    x2: Tensor


def global_lower_bound(
    model: nn.Module, x1: Tensor, x2: Tensor, *, steps: int = 7500, step_size: float = 1e-3
) -> LipschitzLower:
    """Lower bounds of the global constants of the margins, from pairs of inputs that may move anywhere.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode. A copy in float64 is used: in float32 the quotient of two
            inputs that approach each other would soon be rounding error, which is no bound.
        x1: starts, shape (B, ...), such as random test inputs; the largest value of many pairs is the result.
        x2: their partners, shape (B, ...).
        steps: steps of Adam. Each costs one forward and one backward pass for all pairs.
        step_size: learning rate of Adam.
    """
    check_model(model)
    for x in (x1, x2):
        check_inputs(x, -torch.inf, torch.inf)
        check_place(model, x)
        check_logits(model, x)
    if x1.shape != x2.shape:
        raise InputError(f"x1 and x2 must have the same shape, got {tuple(x1.shape)} and {tuple(x2.shape)}")
    return _ascend(model, x1.double(), x2.double(), None, lambda moved: moved, steps, step_size)


def local_lower_bound(
    model: nn.Module, x: Tensor, threat: L2, *, steps: int = 5000, step_size: float = 1e-3, seed: int = 0
) -> LipschitzLower:
    """Lower bounds of the constants of z_j - z_i over the threat set of each input, j being the class predicted there.

    Args:
        model: as for `global_lower_bound`.
        x: centres, shape (B, ...).
        threat: both inputs of a pair stay within this ball (and in the valid range).
        steps: steps of Adam.
        step_size: learning rate of Adam.
        seed: fixes the random starts within the ball.
    """
    if not isinstance(threat, L2):
        raise InputError(f"lower bounds in the l2 norm need an L2 threat, got '{threat}'")
    check_task(model, x, None, threat)
    centre, noise = x.double(), Noise.for_batch(seed, len(x), x.device)
    x1, x2 = (threat.random_start(centre, noise.fork(i)) for i in range(2))
    return _ascend(model, x1, x2, centre, lambda moved: threat.project(moved, centre), steps, step_size)


def _ascend(
    model: nn.Module,
    x1: Tensor,
    x2: Tensor,
    centre: Tensor | None,
    project: Callable[[Tensor], Tensor],
    steps: int,
    step_size: float,
) -> LipschitzLower:
    """Adam on the quotients of all pairs; the best of all iterates counts."""
    model = copy.deepcopy(model).double().requires_grad_(False)
    x1, x2 = x1.clone().requires_grad_(), x2.clone().requires_grad_()
    optimiser = torch.optim.Adam([x1, x2], step_size, maximize=True)
    predicted = None if centre is None else model(centre).argmax(1)
    best = LipschitzLower(x1.new_zeros(len(x1)), x1.new_zeros(len(x1), 2, dtype=torch.long), x1.detach(), x2.detach())
    with torch.enable_grad():
        for step in range(steps + 1):
            value, classes = _quotient(model, x1, x2, predicted)
            best = _better(best, LipschitzLower(value.detach(), classes, x1.detach().clone(), x2.detach().clone()))
            if step == steps:
                break
            x1.grad, x2.grad = torch.autograd.grad(value.sum(), [x1, x2])
            optimiser.step()
            with torch.no_grad():
                x1.copy_(project(x1))
                x2.copy_(project(x2))
    return best


def _quotient(model: nn.Module, x1: Tensor, x2: Tensor, predicted: Tensor | None) -> tuple[Tensor, Tensor]:
    """max_i |(z_j - z_i)(x1) - (z_j - z_i)(x2)| / ||x1 - x2|| and (j, i), j predicted at x1 unless it is given."""
    z1, z2 = model(torch.cat([x1, x2])).chunk(2)
    j = z1.argmax(1) if predicted is None else predicted
    change = z1 - z2
    gap, i = (change.gather(1, j[:, None]) - change).abs().max(1)
    # The constant keeps the quotient finite where the inputs meet, and can only make it smaller.
    distance = torch.linalg.vector_norm((x1 - x2).flatten(1), dim=1) + 1e-9
    return gap / distance, torch.stack([j, i], 1)


def _better(a: LipschitzLower, b: LipschitzLower) -> LipschitzLower:
    """For each pair the result with the larger value."""
    wins = b.value > a.value
    pixels = wins.view(-1, *(1,) * (a.x1.ndim - 1))
    return LipschitzLower(
        torch.where(wins, b.value, a.value),
        torch.where(wins[:, None], b.classes, a.classes),
        torch.where(pixels, b.x1, a.x1),
        torch.where(pixels, b.x2, a.x2),
    )


def tightness_ratio(lower: LipschitzLower, upper: LipschitzBound) -> float:
    """The largest lower bound over the largest bound of any pair of classes: 1 is tight, near 0 is loose."""
    if not upper.proven:
        raise InputError("the ratio needs proven upper bounds, from `lipschitz_bound`; these are estimates")
    return float(lower.value.max() / upper.pairs.max())
