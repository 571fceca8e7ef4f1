"""Boundary-based saliency: the gradient at the nearest decision boundary instead of at the input."""

import torch
from torch import Tensor, nn

from holdfast.explanations.core.answers import describe_boundary, finite
from holdfast.explanations.core.boundary import BoundarySearch, nearest_boundary
from holdfast.explanations.core.quantity import Setting, gradients_at, predicted
from holdfast.registry import Explainer
from holdfast.results import Explanation


@Explainer(
    "bsm",
    summary="the gradient at the nearest decision boundary instead of at the input",
    reference="Wang, Fredrikson and Datta, Robust models are more interpretable because attributions look normal, 2022",
)
def bsm(
    model: nn.Module, x: Tensor, y: Tensor, setting: Setting, *, search: BoundarySearch | None = None
) -> Explanation:
    """A(x) = gradient of f_y at the nearest boundary point; shape of x.

    With quantity "margin" it is normal to the boundary; with "logit", as published, it is the gradient of one logit of
    the two that meet there. It explains the class that the model predicts, and says so where that is not y. Where no
    boundary is found `ok` is False, and the answer is the saliency at x.

    Args:
        search: how the boundary is looked for; `BoundarySearch()` if none is given.
    """
    label = predicted(model, x, y, setting.chunk)
    found = nearest_boundary(model, x, setting, search or BoundarySearch())
    # Where none was found, the point is x itself.
    slope, _ = gradients_at(model, found.x_adv, label, setting)
    by = describe_boundary(model, y, label, found, setting, "no boundary within the largest budget; saliency instead")
    ok = torch.isfinite(found.distance) & finite(slope)
    error = torch.full_like(found.distance, torch.nan)
    return Explanation(slope, ok, error, found.gradients + 1, by, slope, found.x_adv, found.distance)
