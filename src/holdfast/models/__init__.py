"""Architectures by name, normalisation as a layer, and safe loading and saving."""

from holdfast.models import aol, centroid, ensemble, liresnet, plain, resnets, vit  # noqa: F401  (each fills the table of architectures)
from holdfast.models.adapters import as_classifier
from holdfast.models.catalog import ModelInfo, count_parameters, get_architecture, list_models, make_model
from holdfast.models.centroid import Centroid, CentroidNet
from holdfast.models.ensemble import Ensemble
from holdfast.models.files import load_model, read_metadata, save_model
from holdfast.models.layers import Arctan, MinMax, Normalize

__all__ = [
    "Arctan",
    "Centroid",
    "CentroidNet",
    "Ensemble",
    "MinMax",
    "ModelInfo",
    "Normalize",
    "as_classifier",
    "count_parameters",
    "get_architecture",
    "list_models",
    "load_model",
    "make_model",
    "read_metadata",
    "save_model",
]
