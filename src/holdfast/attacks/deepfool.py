"""DeepFool: step onto the nearest linearised boundary until the class changes."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.losses import likely_targets
from holdfast.attacks.core.minimum_norm import Search, by_search, check_handled, dual_norm_of, in_threat, per_input
from holdfast.attacks.core.planes import nearest_plane
from holdfast.registry import Attack
from holdfast.utils.options import Count, NotNegative

NORMS = ("linf", "l2")


@by_search
def deepfool_nearest(
    model: nn.Module, search: Search, *, steps: Count = 50, overshoot: NotNegative = 0.02, candidates: Count = 10
) -> None:
    """Add up the moves r onto the nearest boundary, as linearised at x_t = x + (1 + overshoot) r, till one is crossed.

    Fast and rough: the first point found is kept, and ends the run. `fab` and `fmn` go on to closer ones.

    Args:
        steps: most steps that are taken.
        overshoot: relative overshoot, to get across the boundary.
        candidates: boundaries to the classes of highest clean logit that are looked at.
    """
    check_handled(search.norm, "deepfool", NORMS)
    search.goal = torch.finfo(search.x.dtype).max  # any misclassified point ends the path
    logits = model(search.x)
    search.note(search.x, logits)
    if not search.start("deepfool"):
        return
    classes = likely_targets(logits[search.row], search.y, candidates)
    x_t, r = search.x, torch.zeros_like(search.x)
    for _ in range(steps):
        w, value, _ = nearest_plane(model, x_t, search.y, classes, search.norm)
        search.count(classes.shape[1], classes.shape[1])
        r = r + _least_move(w, value, search.norm)
        x_t = search.clip(search.x + (1 + overshoot) * r)
        search.note(x_t, model(x_t))
        if search.over:
            break
        x_t, r, classes = search.leave(x_t, r, classes)


def _least_move(w: Tensor, value: Tensor, norm: str) -> Tensor:
    """The least d with <w, d> = |value|: |value| / |w|_2^2 w for L2, |value| / |w|_1 sign(w) for Linf."""
    size = dual_norm_of(w, norm).clamp(min=torch.finfo(w.dtype).tiny ** 0.5)
    # The authors' 1e-4, in units of the logits: a point on the boundary itself still has to cross it.
    distance = per_input((value.abs() + 1e-4) / size, w)
    return distance * (w / per_input(size, w) if norm == "l2" else w.sign())


deepfool = Attack(
    "deepfool",
    summary="steps onto the nearest linearised boundary until the class changes",
    threats=NORMS,
    nearest=deepfool_nearest,
    reference="Moosavi-Dezfooli, Fawzi and Frossard, DeepFool: a simple and accurate method to fool deep neural "
    "networks, 2016",
)(in_threat("deepfool", deepfool_nearest))
