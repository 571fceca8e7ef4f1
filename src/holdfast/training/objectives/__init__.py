"""What a run minimises: one file per family of losses. Importing this package registers them all."""

from collections.abc import Callable

from torch import Tensor

from holdfast.training.objectives.ablation import ablated_view, ablation
from holdfast.training.objectives.at import adversarial
from holdfast.training.objectives.bcp import bcp
from holdfast.training.objectives.cap import cap
from holdfast.training.objectives.centroid import centroid
from holdfast.training.objectives.certified import crown_ibp, ibp, slope_step
from holdfast.training.objectives.expressive import mtl_ibp, sabr
from holdfast.training.objectives.free import free
from holdfast.training.objectives.gloro import gloro, lmt
from holdfast.training.objectives.mmr import mmr, mmr_at
from holdfast.training.objectives.noisy import consistency, gaussian, macer, noisy_view, smoothadv
from holdfast.training.objectives.pairing import alp, mart, trades
from holdfast.training.objectives.patch import patch
from holdfast.training.objectives.patch_guided import guided
from holdfast.training.objectives.per import per, per_at
from holdfast.training.objectives.sparse import sparse
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.yopo import yopo

PARTS = ("attack", "targets", "regularizers", "perturb_weights")
# Which other parts of a recipe an objective is composed of. One that is not listed here takes none.
TAKES = {
    "standard": PARTS[1:],
    **dict.fromkeys(("at", "trades", "alp", "mart"), PARTS),
    **dict.fromkeys(("ibp", "crown-ibp", "slope-step", "cap"), ("regularizers",)),
    **dict.fromkeys(("sabr", "mtl-ibp"), ("attack", "regularizers")),
    **dict.fromkeys(("per-at", "mmr-at", "smoothadv"), ("attack",)),
}
# The certificate that an objective trains for: it proves the inputs of the validation.
CERTIFIES: dict[str, str] = {
    "ibp": "ibp",
    "crown-ibp": "crown-ibp",
    "slope-step": "crown-ibp",
    "sabr": "crown-ibp",
    "mtl-ibp": "crown-ibp",
    "cap": "fastlin",
    "per": "fastlin",
    "per-at": "fastlin",
    "mmr": "fastlin",
    "mmr-at": "fastlin",
    "bcp": "bcp",
    "centroid": "centroid",
    "gloro": "gloro",
    "lmt": "lipschitz",
    "patch": "patch",
    "patch-guided": "patch",
    "sparse": "sparse",
}
# The bound that an objective trains with, where its certificate is a tighter one.
TRAINS = {"sabr": "ibp", "mtl-ibp": "ibp"}
# Objectives whose loss is that of bounds, not of outputs, which some regularisers look at.
BOUNDED = ("ibp", "crown-ibp", "slope-step", "cap", "sabr", "mtl-ibp")
# Objectives that follow the rise of the budget by themselves: their threats have no radius to scale.
RAMPS = ("patch", "patch-guided", "sparse")
# What a smoothed classifier sees of x, (x, noise, **options of the objective) -> inputs; validated as "noisy" accuracy.
VIEWS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("gaussian", "smoothadv", "consistency", "macer"), noisy_view),
    "ablation": ablated_view,
}

__all__ = [
    "BOUNDED",
    "CERTIFIES",
    "PARTS",
    "RAMPS",
    "TAKES",
    "TRAINS",
    "VIEWS",
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
