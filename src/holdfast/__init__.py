"""Holdfast: how far can an adversary push a neural network before it breaks, why, and what makes it hold?"""

from holdfast.attacks import Nearest, attack, nearest
from holdfast.audits import Audit, audit
from holdfast.bounding import Ascent, bounds
from holdfast.certificates import Smoothed, certify, radius
from holdfast.certificates.models.guard import GuardResult, guard
from holdfast.data import Dataset, load_data
from holdfast.errors import HoldfastError, InputError, SoundnessError, StorageError, UnsupportedError
from holdfast.explanations import explain
from holdfast.models import load_model, make_model, save_model
from holdfast.registry import methods
from holdfast.results import AttackResult, Bounds, CertifyResult, Explanation, TrainResult
from holdfast.threats import L1, L2, Box, Linf, Patch, Sparse, Threat, threat
from holdfast.training import train
from holdfast.utils.reference import reference

__version__ = "0.1.0"

__all__ = [
    "L1",
    "L2",
    "Ascent",
    "AttackResult",
    "Audit",
    "Bounds",
    "Box",
    "CertifyResult",
    "Dataset",
    "Explanation",
    "GuardResult",
    "HoldfastError",
    "InputError",
    "Linf",
    "Nearest",
    "Patch",
    "Smoothed",
    "SoundnessError",
    "Sparse",
    "StorageError",
    "Threat",
    "TrainResult",
    "UnsupportedError",
    "attack",
    "audit",
    "bounds",
    "certify",
    "explain",
    "guard",
    "load_data",
    "load_model",
    "make_model",
    "methods",
    "nearest",
    "radius",
    "reference",
    "save_model",
    "threat",
    "train",
]
