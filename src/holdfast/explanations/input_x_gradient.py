"""Input x gradient: the gradient of the answer at the input, times the input."""

from torch import Tensor, nn

from holdfast.explanations.core.answers import describe, without_error
from holdfast.explanations.core.quantity import Setting, gradients_at
from holdfast.registry import Explainer
from holdfast.results import Explanation


@Explainer(
    "input-x-gradient",
    summary="the gradient times the input: exact shares of the answer of a linear model without bias",
    reference="Shrikumar, Greenside and Kundaje, Learning important features through propagating activation "
    "differences, 2017",
)
def input_x_gradient(model: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> Explanation:
    """A(x) = x * gradient of f_y at x; a value of zero gets zero, whatever it means. Shape of x."""
    slope, values = gradients_at(model, x, y, setting)
    return without_error(x * slope, values, slope, describe(y, setting, "input x gradient"), 1)
