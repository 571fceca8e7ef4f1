"""The cheapest certificate: interval bounds of the margins."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.bounds import interval
from holdfast.bounds.graph import trace
from holdfast.bounds.inputs import BOXES, boxes
from holdfast.registry import register
from holdfast.results import CertifyResult
from holdfast.threats import Threat


def worst_margins(
    margins_of: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    sound: bool,
    chunk: int,
) -> Tensor:
    """Smallest proven margin of each class over all boxes of the threat, shape (B, K).

    Args:
        margins_of: (lower, upper, y) -> lower bounds of z_y - z_j over each box, (N, K).
        x: inputs (B, ...).  y: labels (B,).
        threat: see `holdfast.bounds.inputs.boxes`.
        sound: account for the rounding of the box itself.
        chunk: boxes in memory at a time.
    """
    worst = [
        margins_of(lower, upper, y.repeat_interleave(m)).unflatten(0, (-1, m)).amin(1)
        for lower, upper, m in boxes(threat, x, sound=sound, chunk=chunk)
    ]
    return torch.stack(worst).amin(0)


def from_margins(margins: Tensor, y: Tensor, name: str) -> CertifyResult:
    """The result that follows from proven margins (B, K); NaN (an overflow) proves nothing."""
    margin = margins.scatter(1, y[:, None], torch.inf).amin(1)
    margin = torch.where(margin.isnan(), torch.full_like(margin, -torch.inf), margin)
    certified = margin > 0
    return CertifyResult(certified, margin, by=tuple(name if c else "" for c in certified.tolist()))


@register(
    "certify",
    "ibp",
    summary="interval bounds of the margins; for patches one box for every location",
    guarantee="proof",
    threats=BOXES,
    reference="Gowal et al., On the effectiveness of interval bound propagation, 2018; Chiang et al., 2020 (patches)",
)
def ibp(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True, chunk_boxes: int = 1024
) -> CertifyResult:
    """Certified if the interval bound of every margin z_y - z_j is above zero.

    Prefer it for networks trained with it; on others it proves almost nothing beyond tiny budgets.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: a ball (through its enclosing box), a box or a patch.
        sound: widen every interval by what rounding can do.
        chunk_boxes: boxes in memory at a time.
    """
    graph = trace(model, x)

    def margins_of(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
        return interval.margin_bounds(graph, lower, upper, y, sound=sound)

    return from_margins(worst_margins(margins_of, x, y, threat, sound=sound, chunk=chunk_boxes), y, "ibp")
