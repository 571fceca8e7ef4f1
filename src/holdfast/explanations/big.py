"""Explanations that follow the decision boundary: boundary-based saliency and boundary-based integrated gradients.

Wang, Fredrikson and Datta, "Robust models are more interpretable because attributions look normal", 2022.
"""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.minimum_norm import Nearest, per_input
from holdfast.explanations.core.boundary import BoundarySearch, nearest_boundary
from holdfast.explanations.core.paths import Rule, accepted, check_steps, integrate
from holdfast.explanations.core.quantity import Setting, check_outputs, gradients_at
from holdfast.registry import Explainer, register
from holdfast.results import Explanation

REFERENCE = "Wang, Fredrikson and Datta, Robust models are more interpretable because attributions look normal, 2022"


@torch.no_grad()
def _predicted(model: nn.Module, x: Tensor, y: Tensor, chunk: int) -> Tensor:
    """The predicted classes, (B,); refuses outputs that are no logits, and labels beyond them."""
    logits = torch.cat([model(part) for part in x.split(chunk)])
    check_outputs(logits, y)
    return logits.argmax(1)


def _describe(
    model: nn.Module, y: Tensor, label: Tensor, found: Nearest, setting: Setting, otherwise: str
) -> tuple[str, ...]:
    """What is explained, and against which class; the way out where no boundary was found."""
    rivals = _predicted(model, found.x_adv, y, setting.chunk).tolist()
    lines = []
    for asked, own, rival, name in zip(y.tolist(), label.tolist(), rivals, found.by, strict=True):
        what = f"{setting.quantity} of class {own}"
        if own != asked:
            what += f", which the model predicts, not of {asked}"
        lines.append(f"{what}: boundary to class {rival}, found by {name}" if name else f"{what}: {otherwise}")
    return tuple(lines)


@register(
    Explainer(
        "bsm",
        summary="the gradient at the nearest decision boundary instead of at the input",
        reference=REFERENCE,
    )
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
    label = _predicted(model, x, y, setting.chunk)
    found = nearest_boundary(model, x, setting, search or BoundarySearch())
    # Where none was found, the point is x itself.
    slope, _ = gradients_at(model, found.x_adv, label, setting)
    by = _describe(model, y, label, found, setting, "no boundary within the largest budget; saliency instead")
    ok = torch.isfinite(found.distance) & torch.isfinite(slope).flatten(1).all(1)
    error = torch.full_like(found.distance, torch.nan)
    return Explanation(slope, ok, error, found.gradients + 1, by, slope, found.x_adv, found.distance)


@register(
    Explainer(
        "big",
        summary="integrated gradients from the nearest decision boundary, which no one has to choose",
        reference=REFERENCE,
    )
)
def big(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    search: BoundarySearch | None = None,
    steps: int = 20,
    rule: Rule = "trapezoid",
    tolerance: float | None = 0.01,
    max_steps: int = 3200,
) -> Explanation:
    """A(x) = (x - b) * integral over t of the gradient of f_y at b + t (x - b), b the nearest boundary point.

    It is local, complete, and needs no baseline of the user's. It explains the class that the model predicts, and says
    so where that is not y. Where no boundary is found `ok` is False, and the answer is integrated gradients from black.

    Args:
        search: how the boundary is looked for; `BoundarySearch()` if none is given.
        steps, rule, tolerance, max_steps: of the path; see `integrated-gradients`.
    """
    check_steps(steps, tolerance, max_steps)
    label = _predicted(model, x, y, setting.chunk)
    found = nearest_boundary(model, x, setting, search or BoundarySearch())
    hit = torch.isfinite(found.distance)
    b = torch.where(per_input(hit, x), found.x_adv, setting.low)
    path = integrate(model, x, b, label, setting, steps=steps, rule=rule, tolerance=tolerance, max_steps=max_steps)
    by = _describe(model, y, label, found, setting, "no boundary within the largest budget; path from black instead")
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
