"""DDN: gradient steps put onto a sphere that shrinks while x_t is misclassified."""

import torch
from torch import nn

from holdfast.attacks.core.gradients import input_gradient
from holdfast.attacks.core.losses import cross_entropy
from holdfast.attacks.core.minimum_norm import Search, annealed, by_search, check_handled, in_threat, per_input, unit
from holdfast.registry import Attack
from holdfast.utils.options import Count, Inside, Positive


def run_ddn(model: nn.Module, search: Search, *, steps: int, epsilon: float, gamma: float) -> None:
    """One run from x on the inputs of `search`."""
    x_t, radius = search.x, torch.full_like(search.nearest, epsilon)
    for step in range(steps):
        gradient, _, logits = input_gradient(model, x_t, search.y, cross_entropy)
        wrong = search.note(x_t, logits, gradients=1)
        if search.over:
            return
        x_t, gradient, wrong, radius = search.leave(x_t, gradient, wrong, radius)
        radius = torch.where(wrong, radius * (1 - gamma), radius * (1 + gamma))
        d = x_t + annealed(1.0, 0.01, step, steps) * unit(gradient) - search.x
        x_t = search.clip(search.x + per_input(radius, d) * unit(d))
    search.note(x_t, model(x_t))


@by_search
def ddn_nearest(
    model: nn.Module, search: Search, *, steps: Count = 100, epsilon: Positive = 1.0, gamma: Inside = 0.05
) -> None:
    """Take steps on the cross-entropy, each put onto the sphere of radius epsilon around x; L2 only.

    epsilon shrinks by the share gamma where x_t is misclassified and grows by it elsewhere. The length of the step is
    annealed from 1 to 0.01.

    Args:
        epsilon: radius of the first sphere, in the input's unit.
        gamma: relative change of epsilon at each step.
    """
    check_handled(search.norm, "ddn", ("l2",))
    search.start("ddn")
    run_ddn(model, search, steps=steps, epsilon=epsilon, gamma=gamma)


ddn = Attack(
    "ddn",
    summary="decoupled direction and norm: cross-entropy steps on a sphere that follows the boundary",
    threats=("l2",),
    nearest=ddn_nearest,
    reference="Rony et al., Decoupling direction and norm for efficient gradient-based L2 adversarial attacks and "
    "defenses, 2019",
)(in_threat("ddn", ddn_nearest))
