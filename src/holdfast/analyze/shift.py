"""Accuracy on shifted data: every corruption at every severity, and the mean corruption error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.chance import is_stochastic, mean_prediction
from holdfast.checks import check_labels
from holdfast.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from holdfast.errors import InputError, did_you_mean
from holdfast.models.random import DRAWS
from holdfast.utils.intervals import clopper_pearson
from holdfast.utils.progress import progress_bars


@dataclass(frozen=True, eq=False)
class Shift:
    """Correct predictions among `inputs`: on clean inputs, and by corruption at the severities, in this order."""

    inputs: int
    clean: int
    severities: tuple[int, ...]
    correct: Mapping[str, tuple[int, ...]]

    def errors(self) -> dict[str, list[float]]:
        """The error at each severity, by corruption."""
        return {name: [1 - count / self.inputs for count in counts] for name, counts in self.correct.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each corruption and severity: its accuracy and the 95 % Clopper-Pearson interval."""
        return [
            {
                "corruption": name,
                "severity": severity,
                "accuracy": count / self.inputs,
                "interval": clopper_pearson(count, self.inputs),
            }
            for name, counts in self.correct.items()
            for severity, count in zip(self.severities, counts, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, with the mean corruption error."""
        error = mean_corruption_error(self.errors())
        return {
            "inputs": self.inputs,
            "clean_accuracy": self.clean / self.inputs,
            "severities": list(self.severities),
            "mean_corruption_error": error,
            "rows": self.rows(),
        }


def shifted_accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    batch_size: int = 128,
) -> Shift:
    """Count the correct predictions of `model` on images x (B, C, H, W) and on all corruptions of them.

    The model should be in eval mode; inputs go to its device batch by batch. A model that draws random numbers answers
    with its mean softmax over 20 draws.
    """
    for name in corruptions:
        if name not in CORRUPTIONS:
            raise InputError(f"unknown corruption '{name}'. " + did_you_mean(name, CORRUPTIONS))
    if not corruptions or not severities or len(x) == 0:
        raise InputError("shifted data need at least one input, one corruption and one severity")
    place = next(model.parameters(), x)
    by_chance = is_stochastic(model, x[:2].to(place))

    @torch.no_grad()
    def correct(name: str | None = None, severity: int = 1) -> int:
        total = 0
        for i in range(0, len(x), batch_size):
            part = x[i : i + batch_size]
            part = part if name is None else corrupt(part, name, severity, seed=seed, first=i)
            part = part.to(place)
            logits = mean_prediction(model, part, DRAWS, seed) if by_chance else model(part)
            check_labels(y[i : i + batch_size], len(part), logits.shape[1])
            total += int((logits.argmax(1).cpu() == y[i : i + batch_size].cpu()).sum())
        return total

    counts: dict[str, tuple[int, ...]] = {}
    with progress_bars() as bars:
        bar = bars.add_task("shifted data", total=len(corruptions))
        for name in corruptions:
            counts[name] = tuple(correct(name, severity) for severity in severities)
            bars.advance(bar)
    return Shift(len(x), correct(), tuple(severities), counts)


def mean_corruption_error(
    errors: Mapping[str, Sequence[float]], baseline: Mapping[str, Sequence[float]] | None = None
) -> float:
    """The mean over corruptions of the error over severities, plain or as a ratio to the error of a baseline model.

    plain: mean over c of mean over s of E(s, c);  normalised: mean over c of sum over s of E(s, c) / sum of B(s, c).
    The normalised error is the one of Hendrycks and Dietterich, 2019, with AlexNet as the baseline.

    Example:
        >>> errors = {"fog": [0.25, 0.25], "snow": [0.5, 1.0]}
        >>> mean_corruption_error(errors), mean_corruption_error(errors, {"fog": [0.5, 0.5], "snow": [1.0, 1.0]})
        (0.5, 0.625)
    """
    if not errors or not all(errors.values()):
        raise InputError("the mean corruption error needs the errors of at least one corruption and severity")
    if baseline is None:
        return sum(sum(values) / len(values) for values in errors.values()) / len(errors)
    for name, values in errors.items():
        if len(baseline.get(name, ())) != len(values):
            raise InputError(f"the baseline needs the error at each of the {len(values)} severities of '{name}'")
        if sum(baseline[name]) == 0:
            raise InputError(f"the baseline makes no error on '{name}': a ratio to it means nothing")
    return sum(sum(values) / sum(baseline[name]) for name, values in errors.items()) / len(errors)
