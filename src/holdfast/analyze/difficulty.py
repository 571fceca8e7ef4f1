"""Which instances are hard: a ranking by the loss over a whole training run, and what follows from it.

Adversarial training overfits when it starts to fit the hardest instances (Liu, "Towards verifiable, generalizable and
efficient robust deep neural networks", thesis, 2022, section 4.3). Difficulty says which those are: d near 0 is the
hardest, d near 1 the easiest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.ascent import BALLS, perturb
from holdfast.checks import check_task
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.threats import Threat
from holdfast.training.outputs import forward, top_layer
from holdfast.training.subset import check_difficulty, choose_subset, difficulty
from holdfast.utils.show import Shown

__all__ = ["choose_subset", "d_distance", "difficulty", "group_means", "group_statistics", "groups"]


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


def d_distance(d1: Tensor, d2: Tensor) -> float:
    """Mean of |d1 - d2| over the instances, d1 and d2 of shape (N,): how much two settings disagree on what is hard.

    For scale: 0 for equal rankings; (N^2 - 1) / (3 N^2), about 1/3, is expected of two random ones without ties; a
    ranking and its reverse are 1/2 apart up to 1 / (2 N^2), the most there can be.
    """
    check_difficulty(d1, "d1")
    check_difficulty(d2, "d2")
    if d1.shape != d2.shape:
        raise InputError(f"d1 and d2 must rank the same instances, got {len(d1)} and {len(d2)} of them")
    return float((d1.double() - d2.double()).abs().mean())


def groups(d: Tensor, *, count: int = 10) -> Tensor:
    """Index i of the group i / count <= d < (i + 1) / count that holds each instance, (N,) int64; 0 is the hardest.

    d = 1 belongs to the last group. Without ties all groups have N / count instances, up to one.
    """
    check_difficulty(d, "d")
    if count < 1:
        raise InputError(f"count must be at least 1, got {count}")
    # Quotients, not multiples of 1 / count: where d is the same fraction it then is the same float.
    edges = (torch.arange(1, count, dtype=torch.float64, device=d.device) / count).to(d.dtype)
    return torch.bucketize(d, edges, right=True)


def group_means(values: Tensor, d: Tensor, *, count: int = 10) -> Tensor:
    """Mean over each group of difficulty of what a run logged, (epochs, count) float64, from values (epochs, N).

    Examples that an epoch did not see are NaN in `values` and left out; a group without examples is NaN.
    """
    if values.ndim != 2 or values.shape[1] != len(d):
        raise InputError(f"values must have shape (epochs, {len(d)}), got {tuple(values.shape)}")
    group = groups(d, count=count)
    return torch.stack([values[:, group == i].double().nanmean(1) for i in range(count)], 1)


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
