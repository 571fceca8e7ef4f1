"""The decision boundaries as planes: linearised at a point, and the least move onto them."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import logits_of
from holdfast.attacks.core.hyperplane import move_to_hyperplane
from holdfast.attacks.core.losses import likely_targets
from holdfast.attacks.core.minimum_norm import Search, dual_norm_of, per_input
from holdfast.errors import InputError

BEYOND = (1 + 1e-5, 1 + 1e-3)
"""How far beyond a plane a point is tried, as a share of the way: on the plane itself rounding decides its class."""


def move_onto_plane(x: Tensor, w: Tensor, f: Tensor, p: Tensor, norm: str, low: float, high: float) -> Tensor:
    """The least move of x inside the range onto the plane f + <w, q - p> = 0 of points q, shape of x; f is (B,)."""
    offset = (w * p).flatten(1).sum(1) - f
    return move_to_hyperplane(x.flatten(1), w.flatten(1), offset, norm, low, high).view_as(x)


def project_closest(model: nn.Module, search: Search, *, rounds: int, targets: int, name: str) -> None:
    """Project x onto the boundaries as linearised at its closest point; keep what is closer and misclassified.

    A round tries the boundaries to the `targets` classes of highest logit there, one gradient for each. Exact on a
    linear model with at most `targets` other classes; elsewhere a round moves the point towards the foot of x on its
    piece of the boundary.
    """
    for _ in range(rounds):
        if not search.start(name, torch.isfinite(search.distance)):
            return
        p = search.x_adv[search.row]
        ranked = likely_targets(model(p), search.y, targets)
        search.count(gradients=0, queries=1)
        for target in ranked.unbind(1):
            w, f, _ = nearest_plane(model, p, search.y, target[:, None], search.norm)
            search.count(gradients=1, queries=1)
            move = move_onto_plane(search.x, w, f, p, search.norm, search.low, search.high)
            for beyond in BEYOND:
                x_adv = search.clip(search.x + beyond * move)
                search.note(x_adv, model(x_adv))


def nearest_plane(
    model: nn.Module, x_t: Tensor, y: Tensor, classes: Tensor, norm: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Linearise the boundaries to `classes`; return gradient and z_j - z_y (B,) of the nearest, and logits (B, K).

    One backward pass for each class, all on one forward pass.

    Args:
        x_t: points (B, ...).  y: labels (B,).
        classes: (B, C), class indices, none of them y.
        norm: norm of the distance.
    """
    with torch.enable_grad():
        x_t = x_t.detach().requires_grad_(True)
        logits = logits_of(model, x_t)
        if not logits.requires_grad:
            raise InputError(
                "the model's answer has no gradient with respect to its input; use one without gradients: 'square'"
            )
        values = logits.gather(1, classes) - logits.gather(1, y[:, None])
        planes = [torch.autograd.grad(f.sum(), x_t, retain_graph=True)[0] for f in values[:, 1:].unbind(1)]
        (w,) = torch.autograd.grad(values[:, 0].sum(), x_t)
    values = values.detach()
    if not planes:
        return w, values[:, 0], logits.detach()
    value, far = values[:, 0], values[:, 0].abs() / dual_norm_of(w, norm).clamp(min=1e-12)
    for f, g in zip(values[:, 1:].unbind(1), planes, strict=True):
        far_g = f.abs() / dual_norm_of(g, norm).clamp(min=1e-12)
        closer = far_g < far
        value, far = torch.where(closer, f, value), torch.where(closer, far_g, far)
        w = torch.where(per_input(closer, w), g, w)
    return w, value, logits.detach()


def other_classes(y: Tensor, count: int) -> Tensor:
    """All classes but y, (B, count - 1)."""
    return (y[:, None] + torch.arange(1, count, device=y.device)) % count
