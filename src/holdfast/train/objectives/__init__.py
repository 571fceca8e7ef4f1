"""What a run minimises: one file per family of losses. Importing this package registers them all."""

from holdfast.train.objectives.adversarial import adversarial
from holdfast.train.objectives.free import free
from holdfast.train.objectives.pairing import alp, mart, trades
from holdfast.train.objectives.standard import standard
from holdfast.train.objectives.yopo import yopo

_ALL = ("attack", "targets", "regularizers", "perturb_weights")
# Which other parts of a recipe an objective is composed of. One that is not listed here takes none.
TAKES = {"standard": _ALL[1:], "at": _ALL, "trades": _ALL, "alp": _ALL, "mart": _ALL}

__all__ = ["TAKES", "adversarial", "alp", "free", "mart", "standard", "trades", "yopo"]
