"""Which examples are hard, by their loss over a whole run, and the easy, random or hard part of a training set."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from holdfast.checks import check_labels
from holdfast.data import Split
from holdfast.errors import HoldfastError, InputError
from holdfast.random import Noise
from holdfast.training import folder as files
from holdfast.training.logs import read_examples
from holdfast.training.recipe.recipe import SubsetPart

Kind = Literal["easy", "random", "hard"]


def difficulty(losses: Tensor, *, skip: int = 0) -> Tensor:
    """d_i = P(g_i < g_j) + P(g_i = g_j) / 2 over j uniform in the set, (N,) float64; the mean of d is 1/2.

    g_i is the loss of instance i averaged over the epochs. With average ranks of g, ascending, this is
    d_i = 1 - (rank_i - 1/2) / N: a monotone map of g changes nothing. 0-1 errors in place of losses do as well, with
    more ties.

    Args:
        losses: one average per instance, (N,), or one row per epoch, (epochs, N).
        skip: rows to leave out at the start, where the network is still random.

    >>> difficulty(torch.tensor([0.3, 2.0, 0.3, 0.1])).tolist()
    [0.5, 0.125, 0.5, 0.875]
    """
    if losses.ndim not in (1, 2) or losses.numel() == 0:
        raise InputError(f"losses must have shape (N,) or (epochs, N), none of them 0, got {tuple(losses.shape)}")
    epochs = losses.shape[0] if losses.ndim == 2 else 1
    if not 0 <= skip < epochs:
        raise InputError(f"skip must be from 0 to {epochs - 1} for losses of shape {tuple(losses.shape)}, got {skip}")
    g = losses.double() if losses.ndim == 1 else losses[skip:].double().mean(0)
    if bool(g.isnan().any()):
        raise InputError(f"the loss of instance {int(g.isnan().nonzero()[0])} is NaN and cannot be ranked")
    _, place, equal = torch.unique(g, return_inverse=True, return_counts=True)
    above = len(g) - equal.cumsum(0)
    d: Tensor = (above + equal.double() / 2) / len(g)
    return d[place]


def choose_subset(d: Tensor, y: Tensor, size: int, kind: Kind, *, seed: int = 0) -> Tensor:
    """Indices of the easiest, of random, or of the hardest instances, (size,) int64, ascending; as many of each class.

    Each subset holds `size / classes` instances of each class, such as the easiest; equal ones are taken by index.
    Easy and hard subsets share no instance if no class has fewer than 2 size / classes.

    Args:
        d: difficulties, (N,).  y: labels, (N,) int64.
        size: instances in the subset; a multiple of the number of classes in y.
        kind: "easy", "random" or "hard".
        seed: fixes the random subset.
    """
    check_difficulty(d, "d")
    check_labels(y, len(d))
    _, label, have = torch.unique(y, return_inverse=True, return_counts=True)
    share, rest = divmod(size, len(have))
    if rest or not 1 <= share <= int(have.min()):
        raise InputError(
            f"size must be a multiple of {len(have)}, the number of classes, with at most {int(have.min())} instances "
            f"of each, as many as the smallest class has; got {size}"
        )
    if kind not in ("easy", "random", "hard"):
        raise InputError(f"kind must be 'easy', 'random' or 'hard', got {kind!r}")
    key = Noise.for_batch(seed, len(d), d.device).uniform((), torch.float64) if kind == "random" else d
    order = key.argsort(stable=True)
    order = order[label[order].argsort(stable=True)]  # by class, then by key
    sizes = have[label[order]]
    position = torch.arange(len(d), device=d.device) - (have.cumsum(0) - have)[label[order]]  # within the class
    chosen = position >= sizes - share if kind == "easy" else position < share
    return order[chosen].sort().values


def mean_losses(folder: Path, *, skip: int = 0, zero_one: bool = False) -> Tensor:
    """Loss under the budget of each training example of a run, averaged over its epochs, (N,) float64.

    Args:
        folder: of the run.
        skip: epochs to leave out at the start; needs the log of the losses.
        zero_one: 0-1 errors in place of losses; needs the log too.
    """
    logged = any((folder / files.LOG).glob("examples-*.npz"))
    if not (logged or skip or zero_one):
        return files.read_losses(folder)
    each = read_examples(folder, "error" if zero_one else "loss")
    if not 0 <= skip < len(each):
        raise InputError(f"skip must be from 0 to {len(each) - 1}, the run in '{folder}' has {len(each)} epochs")
    mean = each[skip:].nanmean(0)
    if bool(mean.isnan().any()):
        raise InputError(f"the run in '{folder}' has not seen {int(mean.isnan().sum())} of its inputs")
    return mean


def take_subset(split: Split, part: SubsetPart, fingerprint: int, seed: int) -> Split:
    """The part of a training split that `[subset]` asks for, with as many examples of each class.

    Args:
        split: the whole training split.
        part: the section of the recipe.
        fingerprint: of the split; the run that ranks the examples must have been trained on the same one.
        seed: fixes a random subset.
    """
    d = torch.full((len(split),), 0.5)
    if part.run is not None:
        folder = Path(part.run)
        if files.read_tensors(folder / files.LAST).get("data") != fingerprint:
            raise InputError(
                f"subset.run: the run in '{folder}' was trained on other data; it must have the same data, seed and "
                "validation as this recipe, and no subset"
            )
        d = difficulty(mean_losses(folder, skip=part.skip, zero_one=part.zero_one))
    classes = len(split.y.unique())
    size = classes * max(1, round(part.share * len(split) / classes))
    try:
        return split[choose_subset(d, split.y, size, part.kind, seed=seed)]
    except HoldfastError as error:
        raise InputError(f"subset.share: {error}") from None


def check_difficulty(d: Tensor, name: str) -> None:
    """Refuse what `difficulty` does not give."""
    if d.ndim != 1 or len(d) == 0 or not d.is_floating_point():
        raise InputError(f"{name} must be difficulties of shape (N,), float, got {tuple(d.shape)} of {d.dtype}")
    bad = ~((d >= 0) & (d <= 1))  # NaN too
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise InputError(
            f"{name} must lie in [0, 1], got {float(d[i]):g} for instance {i}; difficulty(losses) gives it"
        )
