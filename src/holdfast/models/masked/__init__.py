"""Sub-networks of fixed weights: a mask over the weights of any network is what is learned."""

from holdfast.models.masked.allocation import keep_counts
from holdfast.models.masked.build import binary_connect, masked, own_form, pruned, train_weights, with_form
from holdfast.models.masked.mask import Mask, Sign, computed, fixed_weights, patterns

__all__ = [
    "Mask",
    "Sign",
    "binary_connect",
    "computed",
    "fixed_weights",
    "keep_counts",
    "masked",
    "own_form",
    "patterns",
    "pruned",
    "train_weights",
    "with_form",
]
