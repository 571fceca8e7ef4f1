"""Holdfast: how far can an adversary push a neural network before it breaks, why, and what makes it hold?"""

from holdfast.errors import HoldfastError, InputError, SoundnessError, StorageError, UnsupportedError
from holdfast.registry import methods
from holdfast.threats import L1, L2, Box, Linf, Patch, Sparse, Threat, threat

__version__ = "0.1.0"

__all__ = [
    "L1",
    "L2",
    "Box",
    "HoldfastError",
    "InputError",
    "Linf",
    "Patch",
    "SoundnessError",
    "Sparse",
    "StorageError",
    "Threat",
    "UnsupportedError",
    "methods",
    "threat",
]
