"""Free adversarial training: the gradient of one pass updates the weights and the perturbation."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.ascent import BALLS, steepest
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.utils.options import Count, Positive


@Objective(
    "free",
    summary="adversarial training at the cost of plain training: each batch is replayed, gradients serve twice",
    reference="Shafahi et al., Adversarial training for free!, 2019",
    threats=BALLS,
    single_step=True,
)
def free(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, replays: Count = 8, step: Positive = 1.0
) -> tuple[Tensor, Metrics]:
    """Mean cross-entropy at x + delta; its backward pass also moves delta, one for each place in the batch.

    The loop replays each batch `replays` times, with an optimiser step each, so that a run of the length of N plain
    epochs takes N / replays of them; m of the paper. `step` is in units of the budget.
    """
    threat, state = context.threat, context.state
    if "delta" not in state or state["delta"].shape[1:] != x.shape[1:] or len(state["delta"]) < len(x):
        state["delta"] = torch.zeros_like(x)
    x_adv = threat.project(x + state["delta"][: len(x)], x).requires_grad_(True)

    def move(gradient: Tensor) -> None:
        with torch.no_grad():
            ahead = x_adv + step * threat.budget * steepest(threat, gradient, x_adv, 0.01)
            state["delta"][: len(x)] = threat.project(ahead, x) - x

    x_adv.register_hook(move)
    logits = model(x_adv)
    return cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).to(x.dtype).mean()}
