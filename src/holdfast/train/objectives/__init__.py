"""What a run minimises: one file per family of losses. Importing this package registers them all."""

from holdfast.train.objectives.adversarial import adversarial
from holdfast.train.objectives.free import free
from holdfast.train.objectives.pairing import alp, mart, trades
from holdfast.train.objectives.standard import standard
from holdfast.train.objectives.yopo import yopo

PARTS = ("attack", "targets", "regularizers", "perturb_weights")
# Which other parts of a recipe an objective is composed of. One that is not listed here takes none.
TAKES = {"standard": PARTS[1:], "at": PARTS, "trades": PARTS, "alp": PARTS, "mart": PARTS}

__all__ = ["PARTS", "TAKES", "adversarial", "alp", "free", "mart", "standard", "trades", "yopo"]
