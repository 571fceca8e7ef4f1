"""Poisoned training: does the family hold networks that fit the training data and fail on everything else?

The networks learn the training samples, repeated, together with the test samples under wrong labels. If they fit both,
the family can express bad fits, and an optimiser that never finds them has a bias (Chiang et al., "Loss landscapes are
all you need", 2023, table 7.1 in the thesis of P. Chiang).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.analyze.volume.family import CHUNK
from holdfast.analyze.volume.fitting import Fitting
from holdfast.analyze.volume.gradient_descent import Start, descend
from holdfast.data import Split
from holdfast.errors import InputError
from holdfast.utils.options import Count, Positive
from holdfast.utils.show import Shown


@dataclass(frozen=True, eq=False, repr=False)
class Poisoned(Shown):
    """Networks that were poisoned.

    Attributes:
        weights: networks that still fit all training samples, (k, P), the worst on the test samples first.
        accuracy: their accuracy on the test samples, (k,) float64.
        runs: networks that were trained.
    """

    weights: Tensor
    accuracy: Tensor
    runs: int


def poison(
    fitting: Fitting,
    test: Split,
    *,
    repeats: Count = 10,
    epochs: Count = 1000,
    lr: Positive = 1e-2,
    batch_size: Count = 400,
    runs: Count = 8,
    start: Start = "default",
    every: Count = 20,
    seed: int = 0,
) -> Poisoned:
    """Train networks to fit `fitting` and to be wrong on `test`; keep those that fit.

    Args:
        test: samples to be wrong on; each gets the class after its own.
        repeats: how often each training sample counts.
        epochs, lr, batch_size: of Adam; it stops when all networks fit and are wrong on every test sample.
        runs: networks trained side by side.
        start: see `gradient_descent`.
        every: steps between two looks at the accuracies.
    """
    if len(test) == 0:
        raise InputError("poisoning needs at least one test sample to be wrong on")
    family = fitting.family
    weights = (family.draw if start == "uniform" else family.start)(runs, seed=seed, like=fitting.x)
    with torch.no_grad():
        classes = family.logits(weights[:1], fitting.x[:1]).shape[2]
    x = torch.cat([fitting.x.repeat_interleave(repeats, 0), test.x])
    y = torch.cat([fitting.y.repeat_interleave(repeats), (test.y + 1) % classes])

    def done(now: Tensor, steps: int) -> bool:
        if steps % every:
            return False
        right = family.logits(now, x, chunk=CHUNK).argmax(2) == y
        return bool(right.all())

    last, _ = descend(
        family, weights, x, y, epochs=epochs, lr=lr, batch_size=batch_size, adam=True, seed=seed, after=done
    )
    with torch.no_grad():
        fits = fitting.measure(last)[0] == 1
        kept = last[fits]
        accuracy = (family.logits(kept, test.x).argmax(2) == test.y).double().mean(1)
    order = accuracy.argsort()
    return Poisoned(kept[order], accuracy[order], runs)
