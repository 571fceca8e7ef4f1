"""What a detector is, and how boxes overlap.

A detector maps images (B, C, H, W) to one tensor (N, 7) for each image, with the columns

    x1, y1, x2, y2, objectness, class score, label

and corners in pixels. Nothing else is asked of it: it may be a network, with or without gradients, or any program.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.errors import InputError

Detector = Callable[[Tensor], Sequence[Tensor]]

COLUMNS = 7
OBJECTNESS, SCORE, LABEL = 4, 5, 6


def iou(a: Tensor, b: Tensor, *, plus_one: bool = False) -> Tensor:
    """Area of the intersection over area of the union, of boxes (..., 4) that broadcast; 0 where both have no area.

    Args:
        plus_one: count pixels, so that a box from 3 to 5 is three wide, as older detection codes do; for comparison.

    >>> iou(torch.tensor([0.0, 0, 2, 2]), torch.tensor([1.0, 0, 3, 2])).item()  # 2 / 6
    0.3333333432674408
    """
    one = 1.0 if plus_one else 0.0
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:4], b[..., 2:4])
    shared = (high - low + one).clamp(min=0).prod(-1)
    areas = [(box[..., 2:4] - box[..., :2] + one).prod(-1) for box in (a, b)]
    union = areas[0] + areas[1] - shared
    return torch.where(union > 0, shared / union.clamp(min=torch.finfo(union.dtype).tiny), torch.zeros_like(union))


def check_detections(detections: Sequence[Tensor], count: int) -> None:
    """Refuse what is not one finite tensor (N, 7) of proper boxes for each of `count` images."""
    if not isinstance(detections, Sequence) or len(detections) != count:
        got = f"{len(detections)} of them" if isinstance(detections, Sequence) else type(detections).__name__
        raise InputError(f"the detector must return a list of {count} tensors, one for each image, got {got}")
    for i, each in enumerate(detections):
        if not isinstance(each, Tensor) or each.ndim != 2 or each.shape[1] != COLUMNS:
            got = str(tuple(each.shape)) if isinstance(each, Tensor) else type(each).__name__
            raise InputError(
                f"the detector must return tensors of shape (N, {COLUMNS}): x1, y1, x2, y2, objectness, class score, "
                f"label; got {got} for image {i} of the batch. No boxes are torch.zeros(0, {COLUMNS})."
            )
    if not detections:
        return
    every = torch.cat([each.detach() for each in detections])
    if not bool(torch.isfinite(every).all()):
        i = next(i for i, each in enumerate(detections) if not bool(torch.isfinite(each).all()))
        raise InputError(f"the detector returns NaN or infinite values for image {i} of the batch")
    wrong = (every[:, 2] < every[:, 0]) | (every[:, 3] < every[:, 1])
    if bool(wrong.any()):
        box = [round(v, 4) for v in every[wrong.nonzero()[0, 0], :4].tolist()]
        raise InputError(f"the detector returns the box {box}; corners must satisfy x1 <= x2 and y1 <= y2")
    labels = every[:, LABEL]
    if bool(((labels < 0) | (labels != labels.round())).any()):
        bad = labels[(labels < 0) | (labels != labels.round())][0]
        raise InputError(f"the detector returns the label {float(bad):g}; labels are whole numbers from 0")
