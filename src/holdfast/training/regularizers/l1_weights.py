"""The sum of the absolute weights, which keeps interval bounds narrow."""

from torch import Tensor

from holdfast.registry import Part
from holdfast.training.context import Metrics
from holdfast.training.step import Taken
from holdfast.utils.options import NotNegative


@Part(
    "l1-weights",
    part="regularizers",
    summary="sum of the absolute weights, which keeps interval bounds narrow",
    reference="Müller et al., Certified training: small boxes are all you need, 2023",
)
def l1_weights(taken: Taken, *, weight: NotNegative = 1e-6) -> tuple[Tensor, Metrics]:
    """weight * sum of |w| over the weights of all linear and convolutional layers, biases left out."""
    at = dict(taken.model.named_parameters()) if taken.weights is None else taken.weights
    total = sum((p.abs().sum() for p in at.values() if p.ndim > 1), taken.x.new_zeros(()))
    return weight * total, {"norm": total}
