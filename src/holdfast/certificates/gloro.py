"""GloRo: margins against a Lipschitz constant for every pair of classes."""

from torch import Tensor, nn

from holdfast.certificates.core.lipschitz_margins import NORMS, certify_by_constants
from holdfast.certificates.core.radius_search import own_radius
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import L2


@Certificate(
    "gloro",
    summary="margins against a Lipschitz constant for every pair of classes: one forward pass, radius in closed form",
    threats=NORMS,
    reference="Leino, Wang and Fredrikson, Globally robust neural networks, 2021",
    quick=True,
    radius=own_radius,
)
def gloro(
    model: nn.Module, x: Tensor, y: Tensor, threat: L2, *, sound: bool = True, logits: Tensor | None = None
) -> CertifyResult:
    """Certified if z_y - z_i > eps K_yi for all i, K_yi = ||w_y - w_i|| times the constant of the layers before.

    For networks trained with the constants in the loss; on others they are far too large. The first call for a model
    computes them, which takes seconds; later ones cost a forward pass.

    What rounding costs grows with the width of the layers and the norm of the inputs; in float64 it is nothing. Known
    `logits` (B, K) save the forward pass. `radius` is the largest one that is proved.
    """
    return certify_by_constants(model, x, y, threat, "gloro", single=False, sound=sound, logits=logits)
