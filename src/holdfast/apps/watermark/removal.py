"""When is a watermark removed? A log of an attack, and the criterion that is put to it.

A watermark counts as removed once the attacked model is still of use (test accuracy above a floor) and the trigger
accuracy has fallen below the threshold of the decision, within a limit of time (Bansal et al., "Certified neural
network watermarks with randomized smoothing", 2022, after Lukas et al., "SoK: how robust is image classification deep
neural network watermarking?", 2022).
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.apps.watermark.adversaries import drift
from holdfast.apps.watermark.certificate import noisy_accuracies, trigger_accuracy
from holdfast.apps.watermark.triggers import TriggerSet
from holdfast.errors import InputError


@dataclass(frozen=True)
class Criterion:
    """What counts as removal; the published values, for CIFAR-10.

    Attributes:
        test_accuracy: the attacked model must stay above it.
        trigger_accuracy: and fall below this on the triggers.
        seconds: within this time of the attack.
    """

    test_accuracy: float = 0.82
    trigger_accuracy: float = 0.30
    seconds: float = 3600.0


@dataclass(frozen=True)
class Snapshot:
    """The state of an attack after an epoch.

    Attributes:
        epoch: 0 is the stolen model.  seconds: time of the attack so far, without the measuring.
        test_accuracy: on clean test data.
        black_box: trigger accuracy.  white_box: its median over noisy copies of the weights.
        distance: l2 distance from the owner's weights.  buffer_distance: the same for the buffers.
    """

    epoch: int
    seconds: float
    test_accuracy: float
    black_box: float
    white_box: float
    distance: float
    buffer_distance: float


class AttackLog:
    """A log that measures a model whenever it is shown one; `watch` is what the attacks take."""

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, triggers: TriggerSet, *, sigma: float, n: int = 100, seed: int = 0
    ) -> None:
        """Measure the owner's model first, before any attack.

        Args:
            model: the owner's, in eval mode; a copy is kept.
            x: test inputs (N, ...).  y: their labels (N,).
            sigma, n, seed: noise, number and seed of the copies for white-box verification.
        """
        if len(x) == 0:
            raise InputError("there must be test inputs to measure the accuracy on")
        self._original = copy.deepcopy(model).eval()
        self._test, self._triggers = (x, y), triggers
        self._sigma, self._n, self._seed = sigma, n, seed
        self._spent = 0.0
        self.rows: list[Snapshot] = []
        self.rows.append(self._measure(self._original, 0.0))
        self._since = time.perf_counter()

    def watch(self, model: nn.Module) -> None:
        """Add a row."""
        self._spent += time.perf_counter() - self._since
        self.rows.append(self._measure(model, self._spent))
        self._since = time.perf_counter()

    def _measure(self, model: nn.Module, seconds: float) -> Snapshot:
        right = noisy_accuracies(model, self._triggers, sigma=self._sigma, n=self._n, seed=self._seed)
        moved = drift(model, self._original)
        return Snapshot(
            epoch=len(self.rows),
            seconds=seconds,
            test_accuracy=clean_accuracy(model, *self._test),
            black_box=trigger_accuracy(model, self._triggers),
            white_box=int(right.sort().values[(len(right) - 1) // 2]) / len(self._triggers),
            distance=moved.parameters,
            buffer_distance=moved.buffers,
        )


@torch.no_grad()
def clean_accuracy(model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = 1024) -> float:
    """Share of the inputs (N, ...) that the model answers with their labels (N,)."""
    batches = zip(x.split(batch_size), y.split(batch_size), strict=True)
    return sum(int((model(a).argmax(1) == b).sum()) for a, b in batches) / len(x)


def removal_time(log: Sequence[Snapshot], criterion: Criterion, *, white_box: bool) -> float | None:
    """Seconds until the watermark was removed, for one of the two ways to verify it; None if it never was.

    0 means that it was not there to begin with.
    """
    for row in log:
        accuracy = row.white_box if white_box else row.black_box
        if (
            row.test_accuracy > criterion.test_accuracy
            and accuracy < criterion.trigger_accuracy
            and row.seconds <= criterion.seconds
        ):
            return row.seconds
    return None
