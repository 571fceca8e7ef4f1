"""Sub-networks of fixed weights: a mask over the weights of any network is what is learned."""

from holdfast.models.masked.allocation import keep_counts
from holdfast.models.masked.build import binary_connect, masked, pruned, train_weights
from holdfast.models.masked.mask import Mask, Sign, computed, fixed_weights, patterns

__all__ = [
    "Mask",
    "Sign",
    "binary_connect",
    "computed",
    "fixed_weights",
    "keep_counts",
    "masked",
    "patterns",
    "pruned",
    "train_weights",
]
