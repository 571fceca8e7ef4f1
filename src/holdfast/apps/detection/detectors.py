"""Detectors that users have, behind the one interface: models of torchvision, of Ultralytics, or of the same shape.

Neither library is needed here, nor imported; what counts is what a model returns. The score of these models is
objectness and class in one number; it becomes the objectness, and the class score is 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.apps.detection.boxes import Detector, check_detections
from holdfast.apps.detection.tiny import TinyDetector, tiny_detector
from holdfast.checks import check_model
from holdfast.errors import InputError

_UNUSED = (0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # ids up to 90 without a class: background, and never annotated
COCO_80 = torch.full((91,), -1)
"""Index 0 ... 79 of the class with each of COCO's 91 ids, which torchvision's models use; -1 for the 11 unused ids."""
COCO_80[[i for i in range(91) if i not in _UNUSED]] = torch.arange(80)


def from_torchvision(
    model: Callable[[list[Tensor]], Sequence[Mapping[str, Tensor]]],
    *,
    objectness: float = 0.0,
    labels: Tensor | None = None,
) -> Detector:
    """A detector from a model that returns dictionaries with "boxes" (N, 4), "scores" (N,) and "labels" (N,).

    Set the model's own threshold of suppression when you make it (box_nms_thresh=0.4 in torchvision).

    Args:
        model: takes a list of images (C, H, W), in evaluation mode.
        objectness: leave out boxes with a lower score.
        labels: new label of each of the model's, -1 to leave it out; `COCO_80` for torchvision's models of COCO.
    """
    _check(model)

    @torch.no_grad()
    def detect(images: Tensor) -> list[Tensor]:
        found = []
        for i, each in enumerate(model([*images])):
            missing = [key for key in ("boxes", "scores", "labels") if not isinstance(each, Mapping) or key not in each]
            if missing:
                raise InputError(
                    "the model must return a dictionary with 'boxes', 'scores' and 'labels' for each image; "
                    f"image {i} lacks '{missing[0]}'"
                )
            found.append(_columns(each["boxes"], each["scores"], each["labels"], objectness, labels))
        return found

    return detect


def from_ultralytics(
    model: Callable[..., Sequence[Any]], *, objectness: float = 0.0, labels: Tensor | None = None, **options: Any
) -> Detector:
    """A detector from a model whose results have `.boxes.xyxy` (N, 4), `.boxes.conf` (N,) and `.boxes.cls` (N,).

    Images are clipped to [0, 1] before they go in: these models take values above 1 for bytes and divide by 255. The
    clipping is then a part of the detector that is smoothed.

    Args:
        model: as `ultralytics.YOLO("yolov8n.pt")`; called as model(images, verbose=False, **options).
        objectness: leave out boxes with a lower confidence.
        labels: new label of each of the model's, -1 to leave it out.
        **options: for the model, such as conf=0.1, iou=0.4; its sides of images must fit its stride.
    """
    # The wrapper of Ultralytics is a module whose own flag stays at "training"; its predictor runs a copy in eval mode.
    if isinstance(model, nn.Module) and not hasattr(model, "predictor"):
        _check(model)

    def detect(images: Tensor) -> list[Tensor]:
        found = []
        for i, each in enumerate(model(images.clamp(0, 1), verbose=False, **options)):
            boxes = getattr(each, "boxes", None)
            if boxes is None or not all(hasattr(boxes, name) for name in ("xyxy", "conf", "cls")):
                raise InputError(
                    f"the result for image {i} has no .boxes with .xyxy, .conf and .cls; is it a detection model?"
                )
            found.append(_columns(boxes.xyxy, boxes.conf, boxes.cls, objectness, labels))
        return found

    return detect


def as_detector(model: nn.Module, images: Tensor) -> Detector:
    """A detector from a model, by what it returns for `images` (B, C, H, W).

    That may be one tensor (N, 7) for each image, or dictionaries as torchvision's models return them; a `TinyDetector`
    gets its threshold and its suppression.
    """
    if isinstance(model, TinyDetector):
        return tiny_detector(model)
    try:
        with torch.no_grad():
            found = model(images)
    except Exception as error:  # code of the user's own can fail in any way
        raise InputError(f"the detector failed on images of shape {tuple(images.shape)}: {error}") from error
    if isinstance(found, Sequence) and found and all(isinstance(each, Mapping) for each in found):
        return from_torchvision(lambda images: model(torch.stack(images)))
    check_detections(found, len(images))

    @torch.no_grad()
    def detect(images: Tensor) -> list[Tensor]:
        return list(model(images))

    return detect


def _columns(boxes: Tensor, scores: Tensor, classes: Tensor, objectness: float, labels: Tensor | None) -> Tensor:
    """Detections (N, 7) from boxes (N, 4), scores (N,) and classes (N,)."""
    classes = classes.long()
    if labels is not None:
        if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < len(labels):
            raise InputError(
                f"the model returns labels up to {int(classes.max())}, but `labels` maps 0 to {len(labels) - 1}"
            )
        classes = labels.to(classes)[classes]
    keep = (classes >= 0) & (scores >= objectness) | scores.isnan()  # NaN goes on, and is refused there
    columns = torch.stack([scores, torch.ones_like(scores), classes.to(scores)], 1)
    return torch.cat([boxes.view(-1, 4), columns], 1)[keep]


def _check(model: object) -> None:
    if isinstance(model, nn.Module):
        check_model(model)
    elif not callable(model):
        raise InputError(f"the model must be a function of images, got {type(model).__name__}")
