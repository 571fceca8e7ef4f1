"""Training for certificates by Lipschitz constants: margins must exceed what the budget can move them.

K_yi estimates how fast z_y - z_i can change, by power iteration that goes on from batch to batch, with gradients for
the weights of every layer. With eps the budget, j the predicted class and z_bottom = max over i != j of z_i + eps K_ji:

    emma     CE(z + e K_y, y),  e_i = clip((z_y - z_i) / K_yi, 0, eps), a constant
    margin   CE(z + eps K_y, y)
    ce       CE([z, z_bottom], y)
    trades   CE(z, y) + weight KL([softmax(z), 0] || softmax([z, z_bottom]))
    ramp     1 - 1 / (1 + sum over i != y of exp(steepness (eps - r_i))),  r_i = (z_y - z_i) / K_yi

The ramp is our own: a smooth count of the examples that are not verified, in the spirit of Collobert, Sinz, Weston and
Bottou, "Trading convexity for scalability", 2006. It does not depend on the scale of the logits, and an example that
is far from being verified has a small gradient, so that it does not cost those that are near.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, softplus

from holdfast.certificates.core.lipschitz_margins import NORMS
from holdfast.certificates.models.gloro import bottom
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.lipschitz import Precision, estimated, margin_loss, metrics
from holdfast.utils.options import Count, NotNegative, Positive

Loss = Literal["emma", "ce", "trades", "margin", "ramp"]


def emma_loss(logits: Tensor, y: Tensor, pairs: Tensor, eps: float) -> Tensor:
    """(B,) from logits (B, K), labels (B,) and constants (K, K).

    A class is pushed away as far as it is already beaten, and by eps at most: every class counts at each step, not only
    the nearest one.
    """
    k = pairs[y]
    with torch.no_grad():
        gap = logits.gather(1, y[:, None]) - logits
        reach = torch.where(k > 0, gap / k, torch.zeros_like(gap)).clamp(0, eps)
    return cross_entropy(logits + reach * k, y, reduction="none")


def ce_loss(logits: Tensor, y: Tensor, pairs: Tensor, eps: float) -> Tensor:
    """Cross-entropy with one more class, which is never right; arguments as for `emma_loss`."""
    return cross_entropy(torch.cat([logits, bottom(logits, pairs, eps)], 1), y, reduction="none")


def trades_loss(logits: Tensor, y: Tensor, pairs: Tensor, eps: float, weight: float) -> Tensor:
    """The divergence is -log(1 - softmax([z, z_bottom])_bottom) = softplus(z_bottom - log sum exp z).

    The other way round, as it is printed by Hu et al., it is infinite.
    """
    rejected = softplus(bottom(logits, pairs, eps)[:, 0] - logits.logsumexp(1))
    return cross_entropy(logits, y, reduction="none") + weight * rejected


def ramp_loss(logits: Tensor, y: Tensor, pairs: Tensor, eps: float, steepness: float) -> Tensor:
    """Between 0 and 1; about the share of examples whose radius is below eps. Arguments as for `emma_loss`."""
    own = one_hot(y, logits.shape[1]).bool()
    gap = logits.gather(1, y[:, None]) - logits
    # Two classes with the same weights have K = 0; that is no reason to divide by zero.
    k = pairs[y].clamp(min=torch.finfo(logits.dtype).eps).masked_fill(own, 1.0)
    short = (steepness * (eps - gap / k)).masked_fill(own, -torch.inf)
    return short.logsumexp(1).sigmoid()


@Objective(
    "gloro",
    summary="globally robust networks: margins above the budget times the Lipschitz constant of each pair of classes",
    reference="Leino, Wang and Fredrikson, Globally robust neural networks, 2021; Hu et al., Unlocking deterministic "
    "robustness certification on ImageNet, 2023 (EMMA)",
    threats=NORMS,
    certificate="gloro",
)
def gloro(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    loss: Loss = "emma",
    weight: NotNegative = 1.0,  # of the divergence in "trades"
    steepness: Positive = 4.0,  # slope of "ramp" for each unit of radius; about six divided by the budget
    steps: Count = 5,  # power iterations for each batch
    precision: Precision = "float32",
) -> tuple[Tensor, Metrics]:
    """See the top of this file.

    "emma" pushes all classes, which matters where there are many; "ce" and "trades" the nearest one; "margin" asks for
    the full budget from the start; "ramp" counts the examples that are not verified, and wants a budget that rises
    slowly. Products of layers with inputs and gradients in `precision` "bfloat16" take two thirds of the time where the
    processor knows it; certificates use the weights as they are, in float32.
    """
    bound, logits = estimated(model, x, context, steps, precision=precision)
    forms: dict[Loss, Callable[..., Tensor]] = {"emma": emma_loss, "ce": ce_loss, "margin": margin_loss}
    forms |= {"trades": partial(trades_loss, weight=weight), "ramp": partial(ramp_loss, steepness=steepness)}
    losses = forms[loss](logits, y, bound.pairs, context.threat.budget)
    return losses.mean(), metrics(logits, y, bound, context)
