"""What a run learns in place of the weights: one file per method. Importing this package registers them all."""

from holdfast.training.prune import binary_connect, edge_popup, hydra  # noqa: F401
