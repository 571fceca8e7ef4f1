"""Box-constraint propagation: a Lipschitz certificate whose ball is cut with a box at every layer."""

import torch
from torch import Tensor, nn

from holdfast.bounding.ball_box.margin import margins, outer_bound, proven_norm
from holdfast.bounding.core.region import Region
from holdfast.bounding.core.rounding import unit
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear.affine import is_affine
from holdfast.certificates.core.margins import certify_margins, interval_margins
from holdfast.certificates.core.proved_norms import cached_norm
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Threat

BALLS = ("l2", "linf", "l1")
REFERENCE = "Lee, Lee and Park, Lipschitz-certifiable training with a tight outer bound, 2020"


@torch.no_grad()
def bcp_margins(graph: Graph, r: Region, y: Tensor, *, sound: bool) -> Tensor:
    """Lower bounds of z_y - z_j, (B, K), from proven norms of the layers; in the dtype of the inputs, rounded down."""
    found = margins(outer_bound(graph, r, proven_norm(cached_norm), sound=sound), y).to(r.x.dtype)
    found = found - 4 * unit(found.dtype) * found.abs() if sound else found
    return torch.maximum(found, interval_margins(graph, r, y, sound=sound)) if is_affine(graph) else found


@Certificate(
    "bcp",
    summary="balls from the norms of the layers, cut with boxes; for networks trained with it",
    threats=BALLS,
    reference=REFERENCE,
)
def bcp(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True) -> CertifyResult:
    """Certified if every margin is above zero over the ball and box of the features before the last layer.

    Never below the margin of the plain Lipschitz bound, and on linf never below the interval bound, up to rounding.
    Like intervals it proves little of a network that was not trained for it; there `crown` is tighter. The first call
    on a model proves the norms of its layers, which takes seconds for a large one; they are remembered.

    Rounding (sound=True): the norms hold for real arithmetic; the rounding errors of each layer are bounded from its
    box and added to the radius of the ball (bounding/ball_box/margin.py): the result holds for the network as it runs.
    Balls of linf and l1 are put into the smallest l2 ball, and into their own box.
    """
    return certify_margins(model, x, y, threat, "bcp", bcp_margins, sound=sound)
