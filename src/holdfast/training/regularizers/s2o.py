"""Second-order statistics optimisation: targets, or a penalty, from the correlation of the outputs."""

from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.registry import Part, get_objective
from holdfast.training.context import Metrics
from holdfast.training.step import Taken
from holdfast.utils.options import Unit

_SELF = 0.2  # share of the target that stays on the label


def correlation_targets(logits: Tensor) -> Tensor:
    """A soft target for each class, (K, K), rows sum to one: more on classes whose logits correlate less with it.

    M = sum_b z_b z_b^T; the row of -|M|, shifted to a smallest value of 0, shares 0.8 among the other classes.
    """
    correlation = -(logits.T @ logits).abs()
    shifted = correlation - correlation.amin(1, keepdim=True)
    shifted = shifted - torch.diag(shifted.diagonal())
    total = shifted.sum(1, keepdim=True)
    others = torch.ones_like(shifted) - torch.eye(len(shifted), dtype=shifted.dtype, device=shifted.device)
    equal = others / others.sum(1, keepdim=True)  # where all correlations are alike, so are the shares
    spread = torch.where(total > 0, shifted / total.clamp(min=torch.finfo(shifted.dtype).tiny), equal)
    return (1 - _SELF) * spread + _SELF * (1 - others)


def _soft_target(logits: Tensor, y: Tensor) -> Tensor:
    """Mean of KL(target_y || softmax(z)), a scalar; the targets carry no gradient."""
    with torch.no_grad():
        target = correlation_targets(logits)[y]
    return torch.nn.functional.kl_div(logits.log_softmax(1), target, reduction="batchmean")


def _frobenius(logits: Tensor) -> Tensor:
    """Frobenius norm of the mean self-product of the centred logits, a scalar."""
    centred = logits - logits.mean(0)
    norm: Tensor = torch.linalg.matrix_norm(centred.T @ centred / len(logits))
    return norm


def _check_recipe(recipe: Any, **_: Any) -> None:
    name = recipe.objective.name
    if get_objective(name).bounded:
        raise InputError(
            f"regularizers.s2o: looks at the outputs that a loss is taken of, but '{name}' takes the loss of bounds; "
            "choose another objective"
        )


@Part(
    "s2o",
    part="regularizers",
    check_recipe=_check_recipe,
    summary="decorrelates the outputs: soft targets from their correlation, or its Frobenius norm",
    reference="Jin et al., Enhancing adversarial training with second-order statistics of weights, 2022",
)
def s2o(
    taken: Taken, *, weight: Unit = 0.1, form: Literal["soft-target", "frobenius"] = "soft-target"
) -> tuple[Tensor, Metrics]:
    """Soft targets: weight * (s2o - fit), which turns the loss into (1 - weight) fit + weight s2o + rest.

    s2o is the mean over the clean and the adversarial outputs. The authors' loss is this one; the text of their paper
    describes a penalty, weight * |A|_F, which is `form = "frobenius"`. Their code has weight 0.1 for adversarial
    training, 0.3 for TRADES.
    """
    if weight == 0:  # the base method, without the further pass that would move batch norm's statistics
        return taken.terms.fit.new_zeros(()), {}
    views = taken.views
    clean = taken.at(taken.x) if views.clean is None else views.clean
    outputs = (clean.logits, views.adv.logits)
    if form == "frobenius":
        value = torch.stack([_frobenius(logits) for logits in outputs]).mean()
        return weight * value, {"value": value}
    value = torch.stack([_soft_target(logits, views.y) for logits in outputs]).mean()
    return weight * (value - taken.terms.fit.mean()), {"value": value}
