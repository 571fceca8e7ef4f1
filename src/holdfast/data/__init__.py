"""Data sets: embedded, downloaded, or your own files."""

from holdfast.data.builtin import mnist_mini, two_moons
from holdfast.data.cache import cache_root
from holdfast.data.dataset import Dataset, Split, split_validation
from holdfast.data.downloads import download
from holdfast.data.load import DataInfo, list_data, load_data
from holdfast.data.scenes import DetectionScenes, detection_scenes, digit_scenes

__all__ = [
    "DataInfo",
    "Dataset",
    "DetectionScenes",
    "Split",
    "cache_root",
    "detection_scenes",
    "digit_scenes",
    "download",
    "list_data",
    "load_data",
    "mnist_mini",
    "split_validation",
    "two_moons",
]
