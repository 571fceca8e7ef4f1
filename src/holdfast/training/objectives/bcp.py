"""Certified training by box-constraint propagation: Lipschitz constants of the layers, and boxes that cut the balls.

loss = kappa CE(z(x), y) + (1 - kappa) CE(-m, y),    m_j the smallest z_y - z_j over the ball and the box
"""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.ball_box.margin import estimated_norm, margins, outer_bound
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace_batch
from holdfast.certificates.bcp import BALLS
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import margin_metrics, mixed
from holdfast.utils.options import Count, Unit


@Objective(
    "bcp",
    summary="certified training for l2 with balls from the norms of the layers, cut with boxes",
    reference="Lee, Lee and Park, Lipschitz-certifiable training with a tight outer bound, 2020",
    threats=BALLS,
    certificate="bcp",
)
def bcp(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    kappa_start: Unit = 1.0,
    kappa_end: Unit = 0.0,
    power_steps: Count = 1,  # power iterations of each layer in one step of training
    solver_steps: Count = 10,  # for ball and box; fewer give a looser loss. The paper takes 10 on MNIST, else 1
) -> tuple[Tensor, Metrics]:
    """kappa CE(z(x), y) + (1 - kappa) CE(-m, y), m over the ball and the box of the last features.

    Gradients flow through the values, the boxes and the norms u^T W v of the layers; u and v are constants, which live
    through the run, and so is the multiplier of the solver. The norms come from below, so the history's "verified"
    counts estimates; the certificate of the validation proves.
    """
    graph, logits = trace_batch(model, x)
    natural = cross_entropy(logits, y)
    kappa = mixed(kappa_start, kappa_end, context)
    if context.threat.budget == 0:
        clean = (logits.gather(1, y[:, None]) - logits).detach()
        metrics = {"robust_loss": natural.detach(), "radius": natural.new_zeros(())}
        return natural, {**margin_metrics(logits, clean, y), **metrics}
    norm = estimated_norm(context.state, steps=power_steps)
    o = outer_bound(graph, region(context.threat, x, sound=False), norm, sound=False)
    m = margins(o, y, steps=solver_steps)
    robust = cross_entropy(-m, y)
    loss = kappa * natural + (1 - kappa) * robust
    metrics = {"robust_loss": robust.detach(), "radius": o.rho.detach().mean()}
    return loss, {**margin_metrics(logits, m, y), **metrics}
