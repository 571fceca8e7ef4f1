"""Certified object detection: median smoothing of any detector, its measures, and an attack to test them."""

from holdfast.apps.detection.adversary import dag
from holdfast.apps.detection.boxes import Detector, check_detections, iou
from holdfast.apps.detection.coco import (
    CocoTruth,
    coco_ap,
    read_coco,
    read_coco_detections,
    write_coco,
    write_coco_detections,
)
from holdfast.apps.detection.denoiser import DnCNN, train_denoiser
from holdfast.apps.detection.detectors import COCO_80, as_detector, from_torchvision, from_ultralytics
from holdfast.apps.detection.encoding import Encoding, decode, encode, flatten
from holdfast.apps.detection.metrics import (
    THRESHOLDS,
    Counts,
    average_precision,
    certified_count,
    certified_curve,
    count,
    curve,
    worst_iou,
)
from holdfast.apps.detection.smoothed_detector import CertifiedDetections, Draws, SmoothedDetector
from holdfast.apps.detection.suppression import nms
from holdfast.apps.detection.tiny import TinyDetector, tiny_detector, train_tiny

__all__ = [
    "COCO_80",
    "THRESHOLDS",
    "CertifiedDetections",
    "CocoTruth",
    "Counts",
    "Detector",
    "DnCNN",
    "Draws",
    "Encoding",
    "SmoothedDetector",
    "TinyDetector",
    "as_detector",
    "average_precision",
    "certified_count",
    "certified_curve",
    "check_detections",
    "coco_ap",
    "count",
    "curve",
    "dag",
    "decode",
    "encode",
    "flatten",
    "from_torchvision",
    "from_ultralytics",
    "iou",
    "nms",
    "read_coco",
    "read_coco_detections",
    "tiny_detector",
    "train_denoiser",
    "train_tiny",
    "worst_iou",
    "write_coco",
    "write_coco_detections",
]
