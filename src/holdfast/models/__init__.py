"""Architectures by name, normalisation as a layer, and safe loading and saving."""

from holdfast.models.adapters import as_classifier
from holdfast.models.catalog import ModelInfo, count_parameters, get_architecture, list_models, make_model
from holdfast.models.disk import load_model, read_metadata, save_model
from holdfast.models.layers import Arctan, MinMax, Normalize
from holdfast.models.zoo import (
    aol,  # noqa: F401  (each fills the table of architectures)
    centroid,  # noqa: F401  (each fills the table of architectures)
    ensemble,  # noqa: F401  (each fills the table of architectures)
    liresnet,  # noqa: F401  (each fills the table of architectures)
    plain,  # noqa: F401  (each fills the table of architectures)
    resnets,  # noqa: F401  (each fills the table of architectures)
    vit,  # noqa: F401  (each fills the table of architectures)
)
from holdfast.models.zoo.centroid import Centroid, CentroidNet
from holdfast.models.zoo.ensemble import Ensemble

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
