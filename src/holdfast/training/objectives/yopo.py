"""YOPO: several updates of the perturbation for each pass through the network, all through its first layer."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.ascent import BALLS, steepest
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.utils.options import Count, Positive


@Objective(
    "yopo",
    summary="adversarial training with several cheap updates of the perturbation for each full pass",
    reference="Zhang et al., You only propagate once: accelerating adversarial training via maximal principle, 2019",
    threats=BALLS,
    single_step=True,
)
def yopo(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    rounds: Count = 5,  # m of YOPO-m-n
    updates: Count = 3,  # n
    step: Positive = 0.25,  # length of one update, in units of the budget (2/255 at 8/255)
) -> tuple[Tensor, Metrics]:
    """Cross-entropy at x', with the mean of the gradients at the `rounds` points on the way there.

    Each round takes one full pass, whose gradient serves the weights and gives the adjoint p at the first layer. Up to
    there the network is affine, so that the direction J^T p is the same for the `updates` steps that follow: they cost
    no further pass.
    """
    threat = context.threat
    x_adv = threat.random_start(x, context.noise)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients: list[Tensor] = []
    loss = x.new_zeros(())
    for turn in range(rounds):
        point = x_adv.detach().requires_grad_(True)
        logits = model(point)
        loss = cross_entropy(logits, y) / rounds
        if turn == rounds - 1:
            break
        direction, *found = torch.autograd.grad(loss, [point, *parameters], allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        gradients = [a + g for a, g in zip(gradients, found, strict=True)] if gradients else found
        with torch.no_grad():
            for _ in range(updates):
                x_adv = threat.project(x_adv + step * threat.budget * steepest(threat, direction, x_adv, 0.01), x)
    # Its value is zero and its gradient sums the earlier rounds, so that one backward pass of the loop does all.
    earlier = sum(((p * g).sum() for p, g in zip(parameters, gradients, strict=False)), loss.new_zeros(()))
    metrics = {"accuracy": (logits.argmax(1) == y).to(x.dtype).mean()}
    return loss + (rounds - 1) * loss.detach() + earlier - earlier.detach(), metrics
