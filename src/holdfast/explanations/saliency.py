"""Saliency: the gradient of the answer at the input."""

from torch import Tensor, nn

from holdfast.explanations.core.answers import describe, without_error
from holdfast.explanations.core.quantity import Setting, gradients_at
from holdfast.registry import Explainer
from holdfast.results import Explanation


@Explainer(
    "saliency",
    summary="the gradient of the answer at the input",
    reference="Simonyan, Vedaldi and Zisserman, Deep inside convolutional networks, 2014",
)
def saliency(model: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> Explanation:
    """A(x) = gradient of f_y at x, with its sign; shape of x.

    The cheapest, and says what an infinitely small change does. On a model that is not robust the gradient at x need
    not be normal to any boundary near x; `bsm` is.
    """
    slope, values = gradients_at(model, x, y, setting)
    return without_error(slope, values, slope, describe(y, setting, "gradient at the input"), 1)
