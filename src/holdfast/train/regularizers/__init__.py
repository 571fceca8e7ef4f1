"""Terms that are added to the loss: one file per family. Importing this package registers them all."""

from holdfast.train.regularizers.bounded import ibp_warmup, l1_weights, relu_stability
from holdfast.train.regularizers.gradient_alignment import gradient_alignment
from holdfast.train.regularizers.s2o import s2o
from holdfast.train.regularizers.trh import trh

__all__ = ["gradient_alignment", "ibp_warmup", "l1_weights", "relu_stability", "s2o", "trh"]
