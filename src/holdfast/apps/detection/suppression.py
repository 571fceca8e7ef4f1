"""Non-maximum suppression: of boxes that show the same object, keep the best."""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.apps.detection.boxes import COLUMNS, LABEL, OBJECTNESS, SCORE, iou
from holdfast.errors import InputError

PADDING = -1.0  # objectness of a row that is no box


def nms(candidates: Tensor, *, objectness: float = 0.0, threshold: float = 0.4, plus_one: bool = False) -> list[Tensor]:
    """Keep the best box, drop the boxes of its class that overlap it, and go on with what is left; batched.

    What is kept comes best first, (K, 7) for each image. Boxes are ranked by objectness times class score. Ties go by
    label and coordinates, so that the answer does not depend on the order of the candidates.

    Args:
        candidates: detections, shape (B, N, 7); rows with an objectness of -1 are padding.
        objectness: boxes below it are dropped first.
        threshold: overlap above which a box is deleted.
        plus_one: see `iou`.
    """
    if candidates.ndim != 3 or candidates.shape[2] != COLUMNS:
        raise InputError(f"candidates must have shape (B, N, {COLUMNS}), got {tuple(candidates.shape)}")
    if bool(candidates.isnan().any()):
        raise InputError("there are NaN among the candidate boxes; is the detector's output finite on noisy images?")
    valid = candidates[..., OBJECTNESS] >= max(objectness, 0.0)
    worst_last = torch.where(valid, -candidates[..., OBJECTNESS] * candidates[..., SCORE], torch.inf)
    ties = [candidates[..., column] for column in (LABEL, 0, 1, 2, 3, OBJECTNESS)]
    order = lexicographic([worst_last, *ties])
    ranked, keep = candidates.gather(1, order[..., None].expand_as(candidates)), valid.gather(1, order)
    boxes, label = ranked[..., :4], ranked[..., LABEL]
    later = torch.arange(ranked.shape[1], device=ranked.device)
    for i in range(int(keep.sum(1).max()) if keep.numel() else 0):
        beaten = (iou(boxes[:, i, None], boxes, plus_one=plus_one) > threshold) & (label[:, i, None] == label)
        keep &= ~(beaten & keep[:, i, None] & (later > i))
    return [each[kept] for each, kept in zip(ranked, keep, strict=True)]


def lexicographic(keys: Sequence[Tensor]) -> Tensor:
    """Indices (..., N) that sort by the first key, ties by the second, and so on; each key has shape (..., N).

    >>> lexicographic([torch.tensor([1, 0, 1]), torch.tensor([5, 6, 4])]).tolist()
    [1, 2, 0]
    """
    order = keys[-1].argsort(dim=-1, stable=True)
    for key in reversed(keys[:-1]):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order
