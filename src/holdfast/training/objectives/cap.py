"""Certified training on the convex adversarial polytope: parallel lines at every ReLU, hidden layers bounded with them.

loss = kappa CE(z(x), y) + (1 - kappa) CE(-m, y),    m_j a lower bound of z_y - z_j by the dual network
"""

from torch import Tensor, nn

from holdfast.bounding.core.region import BALLS, Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.projected import estimate
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.random import Noise
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import Bound, certified_step
from holdfast.utils.options import Count, Unit


def polytope_bound(graph: Graph, r: Region, y: Tensor) -> tuple[Tensor, Relaxation]:
    """The margins of the polytope, exactly.

    By backward substitution, which equals the dual network and keeps to windows on convolutions: with gradients, on
    two convolutions and 32 inputs, it takes at most an eighth of the time and memory of the dual network.
    """
    relaxed = linear.relaxation(graph, r, slopes="parallel", hidden=True, sound=False)
    return linear.margin_bounds(relaxed, y), relaxed


def projected_bound(projections: int, noise: Noise) -> Bound:
    """The same on hidden bounds that `projections` random vectors estimate, the same vectors for all inputs."""
    shared = Noise(noise.seed, noise.index.new_zeros(1), noise.stream)

    def bound(graph: Graph, r: Region, y: Tensor) -> tuple[Tensor, Relaxation]:
        estimated = estimate(graph, r, noise=shared, projections=projections)
        return estimated.margins(y), estimated.unproven

    return bound


@Objective(
    "cap",
    summary="certified training on the convex adversarial polytope: tight at every layer, but expensive",
    reference="Wong and Kolter, Provable defenses against adversarial examples via the convex outer adversarial "
    "polytope, 2018; Wong et al., Scaling provable adversarial defenses, 2018",
    threats=BALLS,
    takes=("regularizers",),
    certificate="fastlin",
    bounded=True,
)
def cap(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    kappa_start: Unit = 0.0,
    kappa_end: Unit = 0.0,
    projections: Count | None = None,
) -> tuple[Tensor, Metrics]:
    """kappa CE(z(x), y) + (1 - kappa) CE(-m, y), m on the convex adversarial polytope.

    With projections the history's "verified" counts estimates; the certificate of the validation is exact.
    `projections` random vectors stand for the backward passes of the hidden layers, 50 as published. None asks for the
    passes themselves, whose time and memory grow with the square of the number of neurons. Not for l1.
    """
    bound = polytope_bound if projections is None else projected_bound(projections, context.noise)
    return certified_step(model, x, y, context, bound, kappa_start=kappa_start, kappa_end=kappa_end)
