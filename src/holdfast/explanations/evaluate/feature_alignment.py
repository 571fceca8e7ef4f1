"""Feature alignment as it is defined: which features matter to the model, and are they those that matter to people?

Wang, "On the feature alignment of deep vision models" (thesis, 2023), definitions 1 and 2. Feature j matters to f at x
with level rho if

    E[(x_j + e) f_y(x + e at j)] >= rho,    e ~ N(0, sigma^2).

A narrow noise asks what matters right at x, a wide one what matters anywhere. The features that matter are I(x)_j = x_j
if j does, else 0, and f is (rho, lambda)-aligned if the mean similarity of its I with people's is at least lambda. The
product is not centred: a constant added to f changes it, so compare probabilities, which all models share a scale for.

One estimate takes a pass for each feature and each draw. For images, `locality` is what can be afforded.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen
from holdfast.checks import check_task
from holdfast.errors import InputError, did_you_mean
from holdfast.explanations.core.quantity import Quantity, values_at
from holdfast.explanations.evaluate.locality import Mean, mean_of
from holdfast.explanations.evaluate.trust import setting_for
from holdfast.threats import Linf
from holdfast.utils.show import Shown

Similarity = Literal["f1", "cosine", "jaccard"]


@torch.no_grad()
def importance(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    sigma: float,
    samples: int = 100,
    quantity: Quantity = "probability",
    seed: int = 0,
    chunk: int = 256,
) -> Tensor:
    """E[(x_j + e) f_y(x + e at j)] for every value j of x (B, ...), estimated from `samples` draws; shape of x.

    Points may leave the range of the data: the definition knows no range.

    Args:
        sigma: standard deviation of the noise; with 0 it is x_j f_y(x).
        samples: draws for each value; the same noise for all values of an input.
    """
    if sigma < 0 or samples < 1:
        raise InputError(f"expected sigma >= 0 and samples >= 1, got {sigma} and {samples}")
    check_task(model, x, y, Linf(0.0), chunk=chunk)
    setting = setting_for(x, quantity=quantity, seed=seed, chunk=chunk)
    noise = torch.stack([setting.noise.fork(k).normal((), x.dtype) for k in range(samples)], 1) * sigma  # (B, samples)
    flat = x.flatten(1)
    found = torch.zeros_like(flat)
    with frozen(model):
        for j in range(flat.shape[1]):
            points = flat[:, None].repeat(1, samples, 1)
            points[:, :, j] += noise
            inputs = points.view(-1, *x.shape[1:])
            values = values_at(model, inputs, y.repeat_interleave(samples), setting).view(len(x), samples)
            found[:, j] = (points[:, :, j] * values).mean(1)
    return found.view_as(x)


def important_features(x: Tensor, level: Tensor, rho: float = 0.0) -> Tensor:
    """I(x): x where the importance `level` is at least rho, else 0; shape of x. For people, `level` may be a mask."""
    if level.shape != x.shape:
        raise InputError(f"expected one level for each value of x {tuple(x.shape)}, got {tuple(level.shape)}")
    return torch.where(level >= rho, x, 0) if level.dtype != torch.bool else torch.where(level, x, 0)


def similarity(model: Tensor, people: Tensor, kind: Similarity = "f1") -> Tensor:
    """How alike two sets of features (B, ...) are, (B,), between 0 and 1; 1 for equal ones, also where both are zero.

    "f1": precision is the share of |model| that lies where people have features, recall the share of |people| that lies
    where the model has; their harmonic mean, symmetric. "cosine": of the values, 0 where it is negative. "jaccard": sum
    of the smaller over sum of the larger of the absolute values.
    """
    if model.shape != people.shape:
        raise InputError(f"expected features of one shape, got {tuple(model.shape)} and {tuple(people.shape)}")
    if kind not in get_args(Similarity):
        raise InputError(f"unknown similarity '{kind}'. " + did_you_mean(str(kind), get_args(Similarity)))
    a, b = model.flatten(1), people.flatten(1)
    size_a, size_b = a.abs(), b.abs()
    if kind == "f1":
        shares = (size_a * (b != 0)).sum(1) / size_a.sum(1), (size_b * (a != 0)).sum(1) / size_b.sum(1)
        found = (2 * shares[0] * shares[1] / (shares[0] + shares[1])).nan_to_num(nan=0.0)
    elif kind == "cosine":
        tiny = torch.finfo(a.dtype).tiny ** 0.5
        found = (a * b).sum(1).clamp(min=0) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=tiny)
    else:
        found = (torch.minimum(size_a, size_b).sum(1) / torch.maximum(size_a, size_b).sum(1)).nan_to_num(nan=0.0)
    return torch.where((a == b).all(1), 1.0, found.clamp(max=1.0))


@dataclass(frozen=True, eq=False, repr=False)
class FeatureAlignment(Shown):
    """(rho, lambda)-alignment of a model on a set of inputs.

    Attributes:
        similarity: (B,).
        mean: of it, with its 95 % interval.
        aligned: the mean is at least lambda.
    """

    similarity: Tensor
    mean: Mean
    aligned: bool


def feature_alignment(
    model: Tensor, people: Tensor, *, at_least: float = 0.5, kind: Similarity = "f1"
) -> FeatureAlignment:
    """Compare the features of the model with people's, both (B, ...) from `important_features`.

    Args:
        at_least: lambda.
    """
    found = similarity(model, people, kind)
    mean = mean_of(found)
    return FeatureAlignment(found, mean, mean.mean >= at_least)
