"""Precision, recall and average precision: measured, and proved for every change of the images within a radius.

One rule for both: an object is found if a detection has its label and overlaps it by at least tau, each detection and
each object used once. The pairs are a maximum matching; choosing them one by one, in whatever order, can give a worse
count for better detections, and the proved count would then bound nothing. Counts are pooled over classes and images,
so the figures differ from COCO's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from holdfast.apps.detection.boxes import LABEL, check_detections, iou
from holdfast.apps.detection.smoothed_detector import CertifiedDetections, Draws
from holdfast.errors import InputError

THRESHOLDS = (0.1, 0.2, 0.4, 0.6, 0.8)  # of objectness; each is one point of a precision-recall curve
Truth = Sequence[tuple[Tensor, Tensor]]  # boxes (K, 4) and labels (K,) of the objects of each image


@dataclass(frozen=True)
class Counts:
    """Over all images: objects found, objects there are, and detections made (at most, where it is a bound)."""

    found: int
    objects: int
    detections: int

    @property
    def recall(self) -> float:
        """Share of the objects that are found."""
        return self.found / self.objects

    @property
    def precision(self) -> float:
        """Share of the detections that find an object; one if there are none."""
        return self.found / self.detections if self.detections else 1.0


def worst_iou(lower: Tensor, upper: Tensor, truth: Tensor) -> Tensor:
    """Smallest overlap with `truth` of any box between `lower` and `upper`; all (..., 4) and broadcast together.

    Along each coordinate the overlap rises and then falls, so that the smallest is at one of the 16 combinations of
    ends. It is 0 where a box may be empty, or a bound is infinite.

    >>> worst_iou(torch.tensor([0.0, 0, 3, 4]), torch.tensor([0.0, 0, 6, 4]), torch.tensor([0.0, 0, 4, 4])).item()
    0.6666666865348816
    """
    finite = torch.isfinite(lower).all(-1) & torch.isfinite(upper).all(-1)
    proper = ((lower[..., 2:] > upper[..., :2]).all(-1)) & finite
    choice = torch.cartesian_prod(*[torch.tensor([False, True], device=lower.device)] * 4)
    corners = torch.where(choice, upper[..., None, :], lower[..., None, :])
    corners = torch.where(proper[..., None, None], corners, torch.zeros_like(corners))
    return torch.where(proper, iou(corners, truth[..., None, :]).amin(-1), 0.0)


def count(detections: Sequence[Tensor], truth: Truth, *, tau: float = 0.5) -> Counts:
    """Counts of plain detections, (N, 7) for each image."""
    _check(len(detections), truth, tau)
    check_detections(detections, len(detections))
    found = 0
    for each, (boxes, labels) in zip(detections, truth, strict=True):
        right = (iou(each[:, None, :4], boxes[None].to(each)) >= tau) & (each[:, LABEL, None] == labels.to(each))
        found += _matched(right)
    return Counts(found, _objects(truth), sum(len(each) for each in detections))


def certified_count(certified: Sequence[CertifiedDetections], truth: Truth, *, tau: float = 0.5) -> Counts:
    """Counts that hold for every change within the radius: `found` at least, `detections` at most.

    A slot finds an object if its label is proved and its worst overlap is at least tau. Every slot that is not proved
    empty may hold a detection.
    """
    _check(len(certified), truth, tau)
    found = 0
    for each, (boxes, labels) in zip(certified, truth, strict=True):
        overlap = worst_iou(each.lower[:, None, :4], each.upper[:, None, :4], boxes[None].to(each.lower))
        found += _matched((overlap >= tau) & (each.label[:, None] == labels.to(overlap.device)))
    return Counts(found, _objects(truth), sum(int((~each.empty).sum()) for each in certified))


def average_precision(points: Sequence[Counts]) -> float:
    """Area under the curve: at each recall the best precision of a point that recalls at least as much.

    This rises with every recall and every precision, so that proved points give a proved area. With precision falling
    as recall grows it is the staircase sum of (r_i - r_{i-1}) precision_i.

    >>> average_precision([Counts(1, 4, 1), Counts(2, 4, 4)])  # 1/4 * 1 + 1/4 * 1/2
    0.375
    """
    area, reached = 0.0, 0.0
    best_first = sorted(points, key=lambda point: -point.precision)
    for point in best_first:
        area += max(0.0, point.recall - reached) * point.precision
        reached = max(reached, point.recall)
    return area


def curve(
    draws: Sequence[Draws], truth: Truth, *, tau: float = 0.5, thresholds: Sequence[float] = THRESHOLDS
) -> list[Counts]:
    """Counts of the smoothed detector at each threshold of objectness."""
    return [count([each.detect(objectness=t) for each in draws], truth, tau=tau) for t in thresholds]


def certified_curve(
    draws: Sequence[Draws],
    truth: Truth,
    epsilon: float,
    confidence: float = 0.999,
    *,
    tau: float = 0.5,
    thresholds: Sequence[float] = THRESHOLDS,
) -> list[Counts]:
    """Counts proved within an L2 distance of `epsilon` at each threshold of objectness.

    Each threshold makes a detector of its own. `confidence` holds for each bound of each of their numbers.
    """
    return [
        certified_count([each.certify(epsilon, confidence, objectness=t) for each in draws], truth, tau=tau)
        for t in thresholds
    ]


def _matched(right: Tensor) -> int:
    """Size of a maximum matching of the rows and columns of a boolean matrix."""
    pairs = right.cpu().numpy()
    return int(pairs[linear_sum_assignment(pairs, maximize=True)].sum())


def _objects(truth: Truth) -> int:
    return sum(len(labels) for _, labels in truth)


def _check(images: int, truth: Truth, tau: float) -> None:
    if not 0 < tau <= 1:
        raise InputError(f"tau is an overlap and must lie in (0, 1], got {tau}")
    if images != len(truth):
        raise InputError(f"there are detections for {images} images but true boxes for {len(truth)}")
    for i, (boxes, labels) in enumerate(truth):
        if boxes.ndim != 2 or boxes.shape[1] != 4 or labels.shape != (len(boxes),):
            raise InputError(
                f"the truth of image {i} must be boxes (K, 4) and labels (K,), got {tuple(boxes.shape)} and "
                f"{tuple(labels.shape)}"
            )
    if _objects(truth) == 0:
        raise InputError("no image has an object, so recall has no meaning; give images with true boxes")
