"""Integrated gradients: the gradient averaged on the way from a baseline, times the way."""

from torch import Tensor, nn

from holdfast.explanations.core.answers import describe
from holdfast.explanations.core.baselines import Baseline, make_baseline, name_of
from holdfast.explanations.core.paths import Rule, accepted, check_steps, integrate
from holdfast.explanations.core.quantity import Setting
from holdfast.registry import Explainer
from holdfast.results import Explanation
from holdfast.utils.options import Count, Positive


@Explainer(
    "integrated-gradients",
    summary="the gradient averaged on the way from a baseline, times the way; adds up to the change of the answer",
    reference="Sundararajan, Taly and Yan, Axiomatic attribution for deep networks, 2017",
)
def integrated_gradients(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    baseline: Baseline | Tensor = "black",
    steps: Count = 50,
    rule: Rule = "trapezoid",
    tolerance: Positive | None = 0.01,
    max_steps: Count = 3200,
) -> Explanation:
    """A(x) = (x - b) * integral over t in [0, 1] of the gradient of f_y at b + t (x - b), shape of x.

    The values add up to f_y(x) - f_y(b). What equals the baseline gets nothing: with a black baseline black pixels do
    not count, even where they decide.

    Args:
        baseline: "black", "white", "blurred", "random", or a tensor of the shape of x or of one input.
        steps: points on the path at first.
        rule: "left", "right", "middle", "trapezoid" or "gauss-legendre".
        tolerance: steps are doubled until the completeness error is at most this; None leaves them as they are.
        max_steps: `ok` is False where this many are not enough.
    """
    check_steps(steps, max_steps)
    b = make_baseline(baseline, x, setting)
    found = integrate(model, x, b, y, setting, steps=steps, rule=rule, tolerance=tolerance, max_steps=max_steps)
    by = describe(y, setting, f"path from {name_of(baseline)}")
    ok = accepted(found, tolerance)
    return Explanation((x - b) * found.slope, ok, found.error, found.gradients, by, found.slope)
