"""Small training sets cut from a data set: a few classes, a few samples of each, inputs standardised."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.data import Dataset, Split
from holdfast.errors import InputError
from holdfast.random import Noise


@dataclass(frozen=True, eq=False)
class FewSamples:
    """A few training samples of some classes, and all test samples of these; labels count from 0.

    Attributes:
        train, test: inputs standardised by the mean and deviation of all training inputs.
        classes: the classes of the data set that were drawn.
    """

    train: Split
    test: Split
    classes: tuple[int, ...]


def few_samples(data: Dataset, count: int, *, classes: int = 2, seed: int = 0) -> FewSamples:
    """Draw `classes` classes, and `count / classes` training samples of each.

    Args:
        data: with training and test split.
        count: training samples; a multiple of `classes`.
        classes: how many classes.
        seed: decides both draws.
    """
    known = data.train.y.unique()
    if not 2 <= classes <= len(known):
        raise InputError(f"'{data.name}' has {len(known)} classes; expected 2 to {len(known)} of them, got {classes}")
    if count < classes or count % classes:
        raise InputError(f"the samples must be shared by {classes} classes equally, got {count}")
    order = Noise.for_batch(seed, len(known)).bits(()).argsort()
    chosen = known[order[:classes]].tolist()
    keys = Noise.for_batch(seed, len(data.train)).fork(1).bits(())
    rows = []
    for label in chosen:
        of_class = (data.train.y == label).nonzero()[:, 0]
        if len(of_class) < count // classes:
            raise InputError(
                f"class {label} of '{data.name}' has {len(of_class)} samples, fewer than {count // classes}"
            )
        rows.append(of_class[keys[of_class].argsort()[: count // classes]])
    mean, std = data.train.x.mean(), data.train.x.std()

    def part(split: Split, index: Tensor) -> Split:
        labels = torch.zeros(len(index), dtype=torch.int64)
        for i, label in enumerate(chosen):
            labels[split.y[index] == label] = i
        return Split((split.x[index] - mean) / std, labels)

    tested = torch.isin(data.test.y, torch.tensor(chosen)).nonzero()[:, 0]
    return FewSamples(part(data.train, torch.cat(rows)), part(data.test, tested), tuple(chosen))
