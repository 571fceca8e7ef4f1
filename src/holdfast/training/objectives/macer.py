"""MACER: training for smoothed classifiers that maximises their certified radius."""

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.noisy_copies import draw, log_mean, metrics, noisy_view, outputs
from holdfast.utils.options import Count, NotNegative, Positive


@Objective(
    "macer",
    summary="smoothed classifiers: cross-entropy of the mean prediction, and its certified radius",
    reference="Zhai et al., MACER: attack-free and scalable robust training via maximizing certified radius, 2020",
    view=noisy_view,
)
def macer(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    sigma: Positive = 0.25,
    samples: Count = 16,
    weight: NotNegative = 12.0,  # of the hinge, lambda of the paper
    gamma: Positive = 8.0,  # at twice the radius in units of sigma the hinge ends
    beta: Positive = 16.0,  # inverse temperature of the probabilities that the radius is made of
) -> tuple[Tensor, Metrics]:
    """-log s_y + weight * sigma / 2 * max(0, gamma - Phi^-1(t_y) + Phi^-1(max over j != y of t_j)).

    t is the mean of softmax(beta z_i). The hinge counts where t_y is the largest: it pulls the radius of inputs that
    are right up to sigma gamma / 2. Letters as in `core.noisy_copies`.
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
