"""Locality at every level rho: how precision falls as more of an attribution counts.

`scores` takes every positive value for important (rho = 0). With the values from the largest down to rho,

    precision(rho) = sum of A M over A >= rho / sum of A over A >= rho,
    recall(rho)    = sum of A M over A >= rho / sum of |A| M,

as in the scores of Wang, "On the feature alignment of deep vision models" (thesis, 2023), definitions 9 and 10. The
average precision is the area under this curve, as in object detection.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.errors import InputError


@dataclass(frozen=True, eq=False)
class LocalityCurve:
    """Precision and recall as rho falls from the largest positive value of an attribution to zero.

    Attributes:
        level: (B, n), the values in falling order; NaN where they are not positive.
        precision, recall: (B, n), of all values down to `level`; NaN where that is NaN.
        average_precision: (B,), sum of precision times the growth of recall: between 0 and 1; NaN for an attribution
            without a positive value, or with nothing inside the mask.
    """

    level: Tensor
    precision: Tensor
    recall: Tensor
    average_precision: Tensor


def locality_curve(attribution: Tensor, mask: Tensor) -> LocalityCurve:
    """The curve of attributions (B, C, H, W), channels added up, on masks (B, H, W); n = H W."""
    if attribution.ndim != 4 or mask.shape != (len(attribution), *attribution.shape[2:]):
        raise InputError(
            f"expected attributions (B, C, H, W) and masks (B, H, W), got {tuple(attribution.shape)} and "
            f"{tuple(mask.shape)}"
        )
    a, m = attribution.sum(1).flatten(1), mask.flatten(1).to(attribution.dtype)
    level, order = a.sort(1, descending=True)
    inside = (level.clamp(min=0) * m.gather(1, order)).cumsum(1)
    precision = inside / level.clamp(min=0).cumsum(1)
    recall = inside / (a.abs() * m).sum(1, keepdim=True)
    # Equal values enter together: only the last of them is a point of the curve.
    last = torch.cat([level[:, :-1] > level[:, 1:], torch.ones_like(level[:, :1], dtype=torch.bool)], 1)
    reached = torch.where(last, recall, 0).cummax(1).values
    before = torch.cat([torch.zeros_like(recall[:, :1]), reached[:, :-1]], 1)
    area = torch.where(last & (level > 0), precision * (recall - before), 0).sum(1)
    area = torch.where((level[:, 0] > 0) & ((a.abs() * m).sum(1) > 0), area, torch.nan)
    counted = level > 0
    level, precision, recall = (torch.where(counted, t, torch.nan) for t in (level, precision, recall))
    return LocalityCurve(level, precision, recall, area)
