"""Architectures by name, normalisation as a layer, and safe loading and saving."""

from holdfast.models.adapters import as_classifier
from holdfast.models.catalog import ModelInfo, count_parameters, get_architecture, list_models, make_model
from holdfast.models.disk import load_model, read_metadata, save_model
from holdfast.models.layers import Arctan, MinMax, Normalize
from holdfast.models.masked import build as _sub_networks  # noqa: F401  (fills the table)
from holdfast.models.random import RandomNetwork, adv_bnn, rse
from holdfast.models.vit_weights import load_vit
from holdfast.models.zoo import (  # noqa: F401  (fill the table)
    aol,
    centroid,
    ensemble,
    liresnet,
    plain,
    potential,
    resnets,
    vit,
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
    "RandomNetwork",
    "adv_bnn",
    "as_classifier",
    "count_parameters",
    "get_architecture",
    "list_models",
    "load_model",
    "load_vit",
    "make_model",
    "read_metadata",
    "rse",
    "save_model",
]
