"""Terms that are added to the loss: one file per family. Importing this package registers them all."""

from holdfast.training.regularizers.bounded import ibp_warmup, l1_weights, relu_stability
from holdfast.training.regularizers.grad_align import gradient_alignment
from holdfast.training.regularizers.s2o import s2o
from holdfast.training.regularizers.trh import trh

__all__ = ["gradient_alignment", "ibp_warmup", "l1_weights", "relu_stability", "s2o", "trh"]
