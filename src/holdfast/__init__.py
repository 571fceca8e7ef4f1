"""Holdfast: how far can an adversary push a neural network before it breaks, why, and what makes it hold?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Where each public name lives. It is imported at its first use, so that `import holdfast` costs next to nothing.
_HOMES = {
    "Ascent": "holdfast.bounding",
    "AttackResult": "holdfast.results",
    "Audit": "holdfast.audits",
    "Bounds": "holdfast.results",
    "Box": "holdfast.threats",
    "CertifyResult": "holdfast.results",
    "Dataset": "holdfast.data",
    "Explanation": "holdfast.results",
    "GuardResult": "holdfast.certificates.models.guard",
    "HoldfastError": "holdfast.errors",
    "InputError": "holdfast.errors",
    "L1": "holdfast.threats",
    "L2": "holdfast.threats",
    "Linf": "holdfast.threats",
    "Nearest": "holdfast.attacks",
    "Patch": "holdfast.threats",
    "Smoothed": "holdfast.certificates",
    "SoundnessError": "holdfast.errors",
    "Sparse": "holdfast.threats",
    "StorageError": "holdfast.errors",
    "Threat": "holdfast.threats",
    "TrainResult": "holdfast.results",
    "UnsupportedError": "holdfast.errors",
    "attack": "holdfast.attacks",
    "audit": "holdfast.audits",
    "bounds": "holdfast.bounding",
    "certify": "holdfast.certificates",
    "explain": "holdfast.explanations",
    "guard": "holdfast.certificates.models.guard",
    "load_data": "holdfast.data",
    "load_model": "holdfast.models",
    "make_model": "holdfast.models",
    "methods": "holdfast.registry",
    "nearest": "holdfast.attacks",
    "radius": "holdfast.certificates",
    "reference": "holdfast.utils.reference",
    "save_model": "holdfast.models",
    "threat": "holdfast.threats",
    "train": "holdfast.training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
