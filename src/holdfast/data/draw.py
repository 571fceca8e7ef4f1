"""Which inputs of a data set are looked at: a seeded draw with as many of each class as of any other."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.data.dataset import Dataset, Split
from holdfast.data.given import Given, as_dataset
from holdfast.errors import InputError, did_you_mean
from holdfast.random import Noise


@dataclass(frozen=True, eq=False)
class Sample:
    """Some inputs of a data set, and how they were chosen.

    Attributes:
        name: the data set and its split.
        classes: one name per class index; empty if they are not known.
        x: inputs, shape (n, ...).  y: labels, shape (n,).
        index: their positions in the split, ascending, shape (n,).
        total: how many inputs the split has.
        drawn: the choice in words, for reports.
    """

    name: str
    classes: tuple[str, ...]
    x: Tensor
    y: Tensor
    index: Tensor
    total: int
    drawn: str


def sample(data: Given, n: int | None = None, *, split: str = "test", seed: int = 0, first: bool = False) -> Sample:
    """The inputs that a run looks at: n of the split, or all of them.

    Data that come without a split of their own (tensors, a folder of class folders) are taken whole.

    Args:
        data: whatever `as_dataset` takes.
        n: how many; all of them if not given or if there are no more.
        split: "test" or "train".
        seed: decides the draw.
        first: take the first n of the split, as version 0.1.0 did: a run that it began goes on with them.
    """
    if n is not None and n < 1:
        raise InputError(f"at least one input is needed, got n = {n}")
    dataset = as_dataset(data)
    if first and len(dataset.train):
        dataset = replace(dataset, whole=None)
    part = part_of(dataset, split)
    count = min(len(part), n or len(part))
    index = torch.arange(count) if first else draw(part.y, count, seed)
    name = dataset.name if dataset.whole is not None else f"{dataset.name} ({split})"
    words = f"the first {count:,} of {len(part):,}" if first else _words(part, count, seed)
    return Sample(name, dataset.classes, part.x[index], part.y[index], index, len(part), words)


def part_of(dataset: Dataset, split: str = "test") -> Split:
    """The inputs that runs look at, and count positions in: the split, or everything if the source has no splits."""
    if split not in ("train", "test"):
        raise InputError(f"unknown split '{split}'. " + did_you_mean(split, ("train", "test")))
    return dataset.whole or (dataset.test if split == "test" else dataset.train)


def draw(y: Tensor, n: int, seed: int = 0) -> Tensor:
    """Positions of n inputs, ascending: classes as equal in number as they can be, by a hash of seed and position.

    A larger n only adds positions.

    >>> draw(torch.tensor([0, 0, 0, 0, 0, 1, 1]), 4).tolist()
    [0, 1, 5, 6]
    """
    if n >= len(y):
        return torch.arange(len(y))
    labels = y.cpu()
    order = Noise.for_batch(seed, len(labels)).bits(()).argsort(stable=True)
    rank = torch.empty_like(order)
    for label in labels.unique():
        members = order[labels[order] == label]
        rank[members] = torch.arange(len(members))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return (rank * len(order) + place).argsort()[:n].sort().values


def _words(part: Split, n: int, seed: int) -> str:
    if n == len(part):
        return f"all {n:,}"
    return f"{n:,} of {len(part):,}, drawn by seed {seed} with the classes balanced"
