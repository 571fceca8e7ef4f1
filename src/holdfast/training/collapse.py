"""Catastrophic overfitting: single-step training that suddenly resists one step and nothing else."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

GAP = 0.3  # accuracy under one step above that under PGD
FALL = 0.5  # accuracy under PGD, as a share of the best before


class CollapseWarning(UserWarning):
    """Training has collapsed; its adversarial examples no longer stand for the threat."""


def collapsed(single: float, robust: float, before: Sequence[float]) -> bool:
    """Whether accuracy under one step is far above accuracy under PGD, which has fallen from its best in the past.

    >>> collapsed(0.8, 0.01, [0.3, 0.4]), collapsed(0.5, 0.4, [0.3, 0.4])
    (True, False)
    """
    return single - robust > GAP and bool(before) and robust <= FALL * max(before)


def warn_of_collapse(row: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> float:
    """1.0 if the epoch `row` shows the collapse, else 0.0; warns in the first epoch that does."""
    single, robust = row["validation_single"], row["validation_robust"]
    found = collapsed(single, robust, [past["validation_robust"] for past in history])
    if found and not any(past.get("collapsed") for past in history):
        warnings.warn(
            f"catastrophic overfitting in epoch {row['epoch']}: accuracy under one step {single:.1%}, under PGD "
            f"{robust:.1%}. Try attack.name = 'atas' or 'n-fgsm', the regulariser 'grad-align', or a smaller budget.",
            CollapseWarning,
            stacklevel=2,
        )
    return float(found)
