"""Which instances are hard: a ranking by the loss over a whole training run, and what follows from it.

Adversarial training overfits when it starts to fit the hardest instances (Liu, "Towards verifiable, generalizable and
efficient robust deep neural networks", thesis, 2022, section 4.3). Difficulty says which those are: d near 0 is the
hardest, d near 1 the easiest.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.ascent import BALLS, perturb
from holdfast.checks import check_labels, check_task
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.threats import Threat
from holdfast.training.outputs import forward, top_layer
from holdfast.utils.show import Shown

Kind = Literal["easy", "random", "hard"]


@dataclass(frozen=True, eq=False, repr=False)
class GroupStatistics(Shown):
    """Means over each group of instances; NaN where a group is empty.

    Attributes:
        loss: (count,) float64, cross-entropy at the inputs that PGD found.
        feature_norm: (count,) float64, l2 norm of the penultimate features at the same inputs.
        size: (count,) int64, instances in the group.
    """

    loss: Tensor
    feature_norm: Tensor
    size: Tensor


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


def d_distance(d1: Tensor, d2: Tensor) -> float:
    """Mean of |d1 - d2| over the instances, d1 and d2 of shape (N,): how much two settings disagree on what is hard.

    For scale: 0 for equal rankings; (N^2 - 1) / (3 N^2), about 1/3, is expected of two random ones without ties; a
    ranking and its reverse are 1/2 apart up to 1 / (2 N^2), the most there can be.
    """
    _check_difficulty(d1, "d1")
    _check_difficulty(d2, "d2")
    if d1.shape != d2.shape:
        raise InputError(f"d1 and d2 must rank the same instances, got {len(d1)} and {len(d2)} of them")
    return float((d1.double() - d2.double()).abs().mean())


def groups(d: Tensor, *, count: int = 10) -> Tensor:
    """Index i of the group i / count <= d < (i + 1) / count that holds each instance, (N,) int64; 0 is the hardest.

    d = 1 belongs to the last group. Without ties all groups have N / count instances, up to one.
    """
    _check_difficulty(d, "d")
    if count < 1:
        raise InputError(f"count must be at least 1, got {count}")
    # Quotients, not multiples of 1 / count: where d is the same fraction it then is the same float.
    edges = (torch.arange(1, count, dtype=torch.float64, device=d.device) / count).to(d.dtype)
    return torch.bucketize(d, edges, right=True)


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
    _check_difficulty(d, "d")
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


@torch.no_grad()
def group_statistics(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    d: Tensor,
    threat: Threat,
    *,
    count: int = 10,
    steps: int = 10,
    step_size: float | None = None,
    seed: int = 0,
    chunk: int = 256,
) -> GroupStatistics:
    """Mean loss under PGD and mean norm of the penultimate features, for each group of difficulty.

    Overfitting shows over the epochs: the loss of the hard groups falls and their features grow while the robust error
    on other data rises. PGD takes all its steps for every instance, as in training.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode, with an nn.Linear at its end.
        x: inputs, shape (N, ...).  y: labels, shape (N,).  d: difficulties of these inputs, shape (N,).
        threat: a ball or a box.
        count: number of groups; see `groups`.
        steps: steps of PGD.
        step_size: in the threat's own unit; 2.5 * budget / steps if none is given.
        seed: fixes the random starts.
    """
    if steps < 1 or chunk < 1:
        raise InputError(f"steps and chunk must be at least 1, got {steps} and {chunk}")
    check_task(model, x, y, threat)
    if threat.name not in BALLS:
        raise UnsupportedError(f"PGD works on the threats {', '.join(BALLS)}, got '{threat}'")
    group = groups(d, count=count)
    if len(d) != len(x):
        raise InputError(f"d must have shape ({len(x)},), one difficulty per input, got {tuple(d.shape)}")
    step_size = 2.5 * threat.budget / steps if step_size is None else step_size
    top, noise = top_layer(model, x[:1]), Noise.for_batch(seed, len(x), x.device)
    sums = torch.zeros(count, 2, dtype=torch.float64, device=x.device)
    for i in range(0, len(x), chunk):
        part = slice(i, i + chunk)
        task = (model, x[part], y[part], threat.select(part))
        x_adv = perturb(*task, noise=noise[part], steps=steps, step_size=step_size)
        output = forward(model, x_adv, top=top)
        loss = cross_entropy(output.logits, y[part], reduction="none")
        norm = output.z.flatten(1).norm(dim=1)
        sums.index_add_(0, group[part], torch.stack([loss, norm], 1).double())
    size = torch.bincount(group, minlength=count)
    mean = sums / size[:, None]
    return GroupStatistics(mean[:, 0], mean[:, 1], size)


def _check_difficulty(d: Tensor, name: str) -> None:
    if d.ndim != 1 or len(d) == 0 or not d.is_floating_point():
        raise InputError(f"{name} must be difficulties of shape (N,), float, got {tuple(d.shape)} of {d.dtype}")
    bad = ~((d >= 0) & (d <= 1))  # NaN too
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise InputError(
            f"{name} must lie in [0, 1], got {float(d[i]):g} for instance {i}; difficulty(losses) gives it"
        )
