"""DDN: gradient steps put onto a sphere that shrinks while x_t is misclassified."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import cross_entropy
from holdfast.attacks.core.minimum_norm import Nearest, Search, annealed, check_handled, in_threat, per_input, unit
from holdfast.random import Noise
from holdfast.registry import Attack, register
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


@torch.no_grad()
def ddn_nearest(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: str = "l2",
    low: float = 0.0,
    high: float = 1.0,
    *,
    noise: Noise | None = None,
    goal: float = 0.0,
    steps: Count = 100,
    epsilon: Positive = 1.0,
    gamma: Inside = 0.05,
) -> Nearest:
    """Take steps on the cross-entropy, each put onto the sphere of radius epsilon around x; L2 only.

    epsilon shrinks by the share gamma where x_t is misclassified and grows by it elsewhere. The length of the step is
    annealed from 1 to 0.01.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        norm: "l2".  low, high: valid range of the input values.
        noise: not used.
        goal: an input is done once a misclassified point within this distance is known.
        steps: gradient steps.
        epsilon: radius of the first sphere, in the input's unit.
        gamma: relative change of epsilon at each step.
    """
    del noise  # deterministic; taken so that every attack can be called in the same way
    check_handled(norm, "ddn", ("l2",))
    search = Search(x, y, norm, low, high, goal)
    search.start("ddn")
    with frozen(model):
        run_ddn(model, search, steps=steps, epsilon=epsilon, gamma=gamma)
    return search.closest()


ddn = register(
    Attack(
        "ddn",
        summary="decoupled direction and norm: cross-entropy steps on a sphere that follows the boundary",
        threats=("l2",),
        nearest=ddn_nearest,
        reference="Rony et al., Decoupling direction and norm for efficient gradient-based L2 adversarial attacks and "
        "defenses, 2019",
    )
)(in_threat("ddn", ddn_nearest))
