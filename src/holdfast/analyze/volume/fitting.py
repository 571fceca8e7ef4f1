"""What an optimiser is asked: a network of a family that fits a few samples, with its loss in given bins.

Every optimiser has one interface, `optimiser(fitting, bins, *, seed, ...) -> Found`, and keeps for each bin a network
that classifies all samples right and has its normalised training loss in (low, high].
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.analyze.volume.family import CHUNK, Family, make_family
from holdfast.analyze.volume.loss_scale import check_homogeneous, loss_scale
from holdfast.checks import check_labels
from holdfast.errors import InputError
from holdfast.utils.show import Shown

Bin = tuple[float, float]
Bins = Sequence[Bin]
ANY: Bins = ((-math.inf, math.inf),)
"""Every loss will do: only all samples must be classified right."""


@dataclass(frozen=True, eq=False)
class Fitting:
    """A family and the samples that its networks are to fit; see `make_fitting`.

    Attributes:
        family: the architecture.
        x: samples, (B, ...).  y: labels, (B,).
        divisor: of the loss normalisation; None for the raw loss.
    """

    family: Family
    x: Tensor
    y: Tensor
    divisor: float | None

    def loss_of(self, logits: Tensor, weights: Tensor) -> Tensor:
        """Mean cross-entropy of each network, (M,), of logits (M, B, K): normalised if there is a divisor."""
        if self.divisor is not None:
            logits = logits / loss_scale(self.family, weights, self.divisor)[:, None, None]
        return mean_loss(logits, self.y)

    def measure(self, weights: Tensor, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
        """Accuracy and loss of each network, both (M,)."""
        logits = self.family.logits(weights, self.x, chunk=chunk)
        return (logits.argmax(2) == self.y).double().mean(1), self.loss_of(logits, weights)


@dataclass(frozen=True, eq=False, repr=False)
class Found(Shown):
    """What an optimiser found.

    Attributes:
        weights: the networks, (k, P).  bin: the bin of each, (k,).  loss: its training loss, (k,).
        hits: networks seen in each bin, (bins,) int64.
        waits: networks tried until the last hit that a bin needed, (bins,) int64; 0 where it never came.
        accepted: networks seen that fit all samples, whatever their loss.
        tried: networks evaluated.
        seconds: time spent.
        last: where a search or a descent ended, (P,).
        path: loss after each accepted step of a search, (T,) float64.
    """

    weights: Tensor
    bin: Tensor
    loss: Tensor
    hits: Tensor
    waits: Tensor
    accepted: int
    tried: int
    seconds: float
    last: Tensor | None = None
    path: Tensor | None = None


def mean_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of each network, (M,), of logits (M, B, K) and labels (B,) or (M, B)."""
    count, samples, _ = logits.shape
    labels = y.expand(count, samples).flatten()
    return cross_entropy(logits.flatten(0, 1), labels, reduction="none").view(count, samples).mean(1)


def make_fitting(module: nn.Module | Family, x: Tensor, y: Tensor, *, divisor: float | None = 3.0) -> Fitting:
    """The question to an optimiser, with everything checked.

    Args:
        module: the architecture, or its family.
        x: samples, (B, ...), in the range that the architecture expects.  y: labels, (B,), of two classes or more.
        divisor: see `loss_scale`; None for architectures whose loss cannot be normalised.
    """
    family = module if isinstance(module, Family) else make_family(module)
    if x.ndim < 2 or len(x) == 0 or not x.is_floating_point():
        raise InputError(f"x must be a float batch (B, ...) with at least one sample, got {x.dtype} {tuple(x.shape)}")
    if not bool(x.isfinite().all()):
        raise InputError(f"sample {int((~x.flatten(1).isfinite().all(1)).nonzero()[0])} holds NaN or infinite values")
    with torch.no_grad():
        classes = family.logits(family.draw(1, seed=0, like=x), x[:1]).shape[2]
    check_labels(y, len(x), classes)
    if len(y.unique()) < 2:
        raise InputError(
            f"all {len(y)} labels are {int(y[0])}: a network that always says so fits them, which says nothing; "
            "give samples of two classes or more"
        )
    if divisor is not None:
        if not divisor > 0:
            raise InputError(f"divisor must be > 0 or None, got {divisor}")
        check_homogeneous(family, x, divisor)
    return Fitting(family, x, y, divisor)


def check_bins(bins: Bins) -> None:
    """Refuse bins that are empty or overlap."""
    for low, high in bins:
        if not low < high:
            raise InputError(f"a bin is (low, high] with low < high, got ({low}, {high}]")
    ordered = sorted(bins)
    for (_, high), (low, _) in itertools.pairwise(ordered):
        if low < high:
            raise InputError(f"bins must not overlap, got {list(bins)}")


def bin_of(loss: Tensor, bins: Bins) -> Tensor:
    """Index of the bin (low, high] that holds each loss, -1 if none does, int64.

    >>> bin_of(torch.tensor([0.3, 0.4, 0.9]), [(0.3, 0.4), (0.4, 0.5)]).tolist()
    [-1, 0, -1]
    """
    found = torch.full(loss.shape, -1, dtype=torch.int64, device=loss.device)
    for i, (low, high) in enumerate(bins):
        found[(loss > low) & (loss <= high)] = i
    return found


def make_bins(low: float, high: float, step: float) -> list[Bin]:
    """Bins of one width.

    >>> make_bins(0.3, 0.4, 0.05)
    [(0.3, 0.35), (0.35, 0.4)]
    """
    count = round((high - low) / step) if step > 0 else 0
    if count < 1 or not math.isclose(low + count * step, high):
        raise InputError(f"the step must divide the range into one bin or more, got {low} to {high} by {step}")
    edges = [float(f"{low + i * step:.10g}") for i in range(count + 1)]
    return list(itertools.pairwise(edges))
