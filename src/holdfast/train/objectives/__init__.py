"""What a run minimises: one file per family of losses. Importing this package registers them all."""

from holdfast.train.objectives.adversarial import adversarial
from holdfast.train.objectives.standard import standard

__all__ = ["adversarial", "standard"]
