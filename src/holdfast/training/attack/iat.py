"""A budget of its own for each training example, smaller for hard ones."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import perturb
from holdfast.attacks.core.losses import Loss
from holdfast.registry import Part
from holdfast.threats import Box, per_input
from holdfast.training.attack.pgd import Mode, pgd
from holdfast.training.context import Context, in_mode
from holdfast.utils.options import Count, Epochs, NotNegative, Unit


@Part(
    "iat",
    part="attack",
    summary="inner maximum in a budget that each example earns: larger while it is still classified right",
    reference="Balaji, Goldstein and Hoffman, Instance adaptive adversarial training, 2019",
    threats=("linf",),
)
def iat(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    context: Context,
    *,
    steps: Count = 10,  # of each PGD, of length 2.5 eps_i / steps
    gamma: NotNegative = 0.2375,  # in units of the threat's budget (1.9/255 at 8/255); 0 is plain adversarial training
    beta: Unit = 0.1,  # how fast eps_i follows
    warmup: Epochs = 5,  # epochs of plain adversarial training at the threat's budget
    mode: Mode = "eval",
) -> Tensor:
    """PGD in the ball of the example's own eps_i, which follows what the example can stand; shape of x.

    With eps' = eps_i + gamma if PGD there leaves the class right, else eps_i if PGD there does, else eps_i - gamma, the
    example is perturbed by at most eps', and eps_i <- (1 - beta) eps_i + beta eps'. Inputs that are misclassified
    without a perturbation are trained as they are.
    """
    state, threat = context.state, context.threat
    if "eps" not in state:
        state["eps"] = torch.ones(context.count, dtype=x.dtype, device=x.device)  # in units of the threat's budget
    eps = state["eps"][context.index]
    if context.epoch < warmup or gamma == 0:
        return pgd(model, x, y, loss, context, steps=steps, mode=mode)

    def ball(eps: Tensor) -> Box:
        radius = per_input(eps * threat.budget, x).expand_as(x)
        return Box(radius=radius, batched=True, low=threat.low, high=threat.high)

    def attacked(eps: Tensor) -> tuple[Tensor, Tensor]:
        size = 2.5 / steps
        x_adv = perturb(model, x, y, ball(eps), noise=context.noise, steps=steps, step_size=size, loss=loss)
        with torch.no_grad():
            return x_adv, model(x_adv).argmax(1) == y

    with in_mode(model, mode == "train"):
        with torch.no_grad():
            right = model(x).argmax(1) == y
        wider, holds_wider = attacked(eps + gamma)
        same, holds = attacked(eps)
    reached = torch.where(holds_wider, eps + gamma, torch.where(holds, eps, (eps - gamma).clamp(min=0)))
    x_adv = ball(reached * right).project(torch.where(per_input(holds_wider, x), wider, same), x)
    state["eps"][context.index] = (1 - beta) * eps + beta * reached
    context.notes["eps"] = reached * threat.budget
    return x_adv
