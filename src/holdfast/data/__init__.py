"""Data sets: embedded, downloaded, or your own files."""

from holdfast.data.builtin import mnist_mini, two_moons
from holdfast.data.dataset import Dataset, Split, split_validation
from holdfast.data.download import download
from holdfast.data.files import cache_root
from holdfast.data.load import DataInfo, list_data, load_data

__all__ = [
    "DataInfo",
    "Dataset",
    "Split",
    "cache_root",
    "download",
    "list_data",
    "load_data",
    "mnist_mini",
    "split_validation",
    "two_moons",
]
