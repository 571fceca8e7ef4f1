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
    from holdfast.properties import Property, load_property, verify
    from holdfast.registry import methods
    from holdfast.results import AttackResult, Bounds, CertifyResult, Explanation, TrainResult, Verdict
    from holdfast.threats import L1, L2, Box, Linf, Patch, PatchShape, Sparse, Threat, threat
    from holdfast.training import train
    from holdfast.utils.reference import reference

__version__ = "0.1.0"

__all__ = [
    "attack",
    "audit",
    "bounds",
    "certify",
    "explain",
    "guard",
    "methods",
    "nearest",
    "radius",
    "train",
    "verify",
]
__all__ += ["Dataset", "Property", "load_data", "load_model", "load_property", "make_model", "reference", "save_model"]
__all__ += ["L1", "L2", "Box", "Linf", "Patch", "PatchShape", "Sparse", "Threat", "threat"]
__all__ += ["AttackResult", "Audit", "Bounds", "CertifyResult", "Explanation", "GuardResult", "Nearest", "TrainResult"]
__all__ += ["Ascent", "HoldfastError", "InputError", "Smoothed", "SoundnessError", "StorageError", "UnsupportedError"]
__all__ += ["Verdict", "verify"]

# Where the public names live. Each is imported at its first use, so that `import holdfast` costs next to nothing.
_NAMES = {
    "attacks": "Nearest attack nearest",
    "audits": "Audit audit",
    "bounding": "Ascent bounds",
    "certificates": "Smoothed certify radius",
    "certificates.models.guard": "GuardResult guard",
    "data": "Dataset load_data",
    "errors": "HoldfastError InputError SoundnessError StorageError UnsupportedError",
    "explanations": "explain",
    "models": "load_model make_model save_model",
    "properties": "Property load_property verify",
    "registry": "methods",
    "results": "AttackResult Bounds CertifyResult Explanation TrainResult Verdict",
    "threats": "L1 L2 Box Linf Patch PatchShape Sparse Threat threat",
    "training": "train",
    "utils.reference": "reference",
}
_HOMES = {name: f"holdfast.{home}" for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
