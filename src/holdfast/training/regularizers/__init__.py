"""Terms that are added to the loss: one file per method. Importing this package registers them all."""

from holdfast.training.regularizers import (  # noqa: F401
    grad_align,
    graddiv,
    ibp_warmup,
    l1_weights,
    relu_stability,
    s2o,
    trh,
)
