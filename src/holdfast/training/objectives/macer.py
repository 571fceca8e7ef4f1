"""MACER: training for smoothed classifiers that maximises their certified radius."""

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from holdfast.registry import Objective, register
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.smoothed import draw, log_mean, metrics, noisy_view, outputs
from holdfast.utils.options import Count, NotNegative, Positive


@register(
    Objective(
        "macer",
        summary="smoothed classifiers: cross-entropy of the mean prediction, and its certified radius",
        reference="Zhai et al., MACER: attack-free and scalable robust training via maximizing certified radius, 2020",
        view=noisy_view,
    )
)
def macer(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    sigma: Positive = 0.25,
    samples: Count = 16,
    weight: NotNegative = 12.0,
    gamma: Positive = 8.0,
    beta: Positive = 16.0,
) -> tuple[Tensor, Metrics]:
    """-log s_y, and a hinge that pulls the radius of what is right up to sigma gamma / 2; see the top of this file.

    Args:
        model: from (B, ...) to logits (B, K); it meets values outside the valid range.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        sigma: standard deviation of the noise, that of the certificate.
        samples: m, draws for each input.
        weight: lambda of the paper, of the hinge.
        gamma: at twice the radius in units of sigma the hinge ends.
        beta: inverse temperature of the probabilities that the radius is made of.
    """
    logits = outputs(model, x, draw(x, context.noise, sigma, samples))
    t = (beta * logits).softmax(2).mean(1)
    right = t.argmax(1) == y
    t_y = t.gather(1, y[:, None])[:, 0]
    t_other = t.scatter(1, y[:, None], 0.0).amax(1)
    # Where a quantile is infinite, or nearly so, the hinge has ended, and its gradient is left out before it is NaN.
    least = 4 * torch.finfo(t.dtype).eps
    inside = right & (t_y < 1 - least) & (t_other > least)
    room = torch.special.ndtri(t_y.where(inside, t_y.new_tensor(0.5)))
    room = room - torch.special.ndtri(t_other.where(inside, t_other.new_tensor(0.5)))
    hinge = torch.where(inside, (gamma - room).clamp(min=0), torch.zeros_like(room))
    loss = nll_loss(log_mean(logits), y) + weight * sigma / 2 * hinge.mean()
    return loss, {**metrics(logits, y), "hinge": hinge.detach().mean()}
