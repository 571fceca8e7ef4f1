"""Terms that are added to the loss: one file per method. Importing this package registers them all."""

from holdfast.training.regularizers import grad_align, ibp_warmup, l1_weights, relu_stability, s2o, trh  # noqa: F401
