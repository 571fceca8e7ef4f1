"""Lipschitz-margin training on the ellipsoid: the ball in front of the last layer, and that layer as it is.

With rho = eps L^(1) ... L^(K-1), the radius of the ball that holds the last features, the image of that ball under the
last layer is an ellipsoid, over which z_y - z_j is at least z_y - z_j - rho |W_y - W_j|.

loss = CE(z + rho |W_y - W|, y)
"""

from torch import Tensor, nn

from holdfast.certificates.core.lipschitz_margins import NORMS
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.lipschitz import estimated, margin_loss, metrics
from holdfast.utils.options import Count


@Objective(
    "lmt-ellipsoid",
    summary="Lipschitz-margin training on the ellipsoid: the weights of each pair of classes in place of one constant",
    reference="Lee, Lee and Park, Lipschitz-certifiable training with a tight outer bound, 2020, which names it LMT; "
    "Tsuzuku, Sato and Sugiyama, Lipschitz-margin training, 2018",
    threats=NORMS,
    certificate="gloro",
)
def lmt_ellipsoid(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, steps: Count = 1
) -> tuple[Tensor, Metrics]:
    """CE(z + eps K_y, y) with K_yj = L^(1) ... L^(K-1) |W_y - W_j|: `gloro` with the margin loss.

    Prefer it to `lmt`, whose ball is never smaller; `steps` are steps of power iteration for each batch.
    """
    bound, logits = estimated(model, x, context, steps)
    losses = margin_loss(logits, y, bound.pairs, context.threat.budget)
    return losses.mean(), metrics(logits, y, bound, context)
