"""Boundary-based integrated gradients: the path starts at the nearest decision boundary."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.minimum_norm import per_input
from holdfast.explanations.core.answers import describe_boundary
from holdfast.explanations.core.boundary import BoundarySearch, nearest_boundary
from holdfast.explanations.core.paths import Rule, accepted, check_steps, integrate
from holdfast.explanations.core.quantity import Setting, predicted
from holdfast.registry import Explainer
from holdfast.results import Explanation
from holdfast.utils.options import Count, Positive


@Explainer(
    "big",
    summary="integrated gradients from the nearest decision boundary, which no one has to choose",
    reference="Wang, Fredrikson and Datta, Robust models are more interpretable because attributions look normal, 2022",
)
def big(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    search: BoundarySearch | None = None,
    steps: Count = 20,
    rule: Rule = "trapezoid",
    tolerance: Positive | None = 0.01,
    max_steps: Count = 3200,
) -> Explanation:
    """A(x) = (x - b) * integral over t of the gradient of f_y at b + t (x - b), b the nearest boundary point.

    It is local, complete, and needs no baseline of the user's. It explains the class that the model predicts, and says
    so where that is not y. Where no boundary is found `ok` is False, and the answer is integrated gradients from black.

    Args:
        search: how the boundary is looked for; `BoundarySearch()` if none is given.
        steps, rule, tolerance, max_steps: how the path is integrated; see `integrated-gradients`.
    """
    check_steps(steps, max_steps)
    label = predicted(model, x, y, setting.chunk)
    found = nearest_boundary(model, x, setting, search or BoundarySearch())
    hit = torch.isfinite(found.distance)
    b = torch.where(per_input(hit, x), found.x_adv, setting.low)
    path = integrate(model, x, b, label, setting, steps=steps, rule=rule, tolerance=tolerance, max_steps=max_steps)
    by = describe_boundary(
        model, y, label, found, setting, "no boundary within the largest budget; path from black instead"
    )
    return Explanation(
        (x - b) * path.slope,
        hit & accepted(path, tolerance),
        path.error,
        found.gradients + path.gradients,
        by,
        path.slope,
        found.x_adv,
        found.distance,
    )
