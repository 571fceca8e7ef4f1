"""What a run minimises: one file per family of losses. Importing this package registers them all."""

from holdfast.training.objectives.ablation import ablation
from holdfast.training.objectives.at import adversarial
from holdfast.training.objectives.bcp import bcp
from holdfast.training.objectives.cap import cap
from holdfast.training.objectives.centroid import centroid
from holdfast.training.objectives.certified import crown_ibp, ibp, slope_step
from holdfast.training.objectives.expressive import mtl_ibp, sabr
from holdfast.training.objectives.free import free
from holdfast.training.objectives.gloro import gloro, lmt
from holdfast.training.objectives.mmr import mmr, mmr_at
from holdfast.training.objectives.noisy import consistency, gaussian, macer, smoothadv
from holdfast.training.objectives.pairing import alp, mart, trades
from holdfast.training.objectives.patch import patch
from holdfast.training.objectives.patch_guided import guided
from holdfast.training.objectives.per import per, per_at
from holdfast.training.objectives.sparse import sparse
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.yopo import yopo

__all__ = [
    "ablation",
    "adversarial",
    "alp",
    "bcp",
    "cap",
    "centroid",
    "consistency",
    "crown_ibp",
    "free",
    "gaussian",
    "gloro",
    "guided",
    "ibp",
    "lmt",
    "macer",
    "mart",
    "mmr",
    "mmr_at",
    "mtl_ibp",
    "patch",
    "per",
    "per_at",
    "sabr",
    "slope_step",
    "smoothadv",
    "sparse",
    "standard",
    "trades",
    "yopo",
]
