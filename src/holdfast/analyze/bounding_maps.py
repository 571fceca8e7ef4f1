"""What a certified box tells about a model: which input values it relies on, and how alike its boundaries are.

A value that may move far without any change of class is one that the model does not use; a small half-width marks a
value that it relies on (Liu, Tomioka and Cevher, "On certifying non-uniform bounds against adversarial attacks", 2019).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.utils.show import Shown


@dataclass(frozen=True, eq=False, repr=False)
class Similarity(Shown):
    """Cosines between the half-widths of every two inputs.

    For scale: two vectors uniform in [0, 1]^n have a cosine of 3/4 for large n. All boxes of a linear classifier with
    two classes are parallel, cosine 1.

    Attributes:
        mean: over all pairs of different inputs.
        minimum: over the same pairs.
        matrix: (B, B).
    """

    mean: float
    minimum: float
    matrix: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class FeatureRobustness(Shown):
    """How far each input value may move, over all inputs.

    Attributes:
        typical: geometric mean of the half-widths over the inputs, shape of one input.
        counts: (bins,) int64, how many of all half-widths lie in each bin.
        edges: (bins + 1,) ends of the bins, spaced evenly in the logarithm.
    """

    typical: Tensor
    counts: Tensor
    edges: Tensor


def bounding_map(radius: Tensor) -> Tensor:
    """Pictures in [0, 1] of the half-widths, (B, C, H, W) -> (B, H, W): light where the model relies on the pixel.

    The scale is logarithmic and of each picture by itself: 1 at the smallest half-width, 0 at the largest. Of several
    channels the smallest half-width counts.
    """
    if radius.ndim != 4:
        raise InputError(f"a bounding map needs half-widths of images, (B, C, H, W), got shape {tuple(radius.shape)}")
    size = _log(radius).amin(1).flatten(1)
    low, high = size.amin(1, keepdim=True), size.amax(1, keepdim=True)
    light = (high - size) / (high - low).clamp(min=torch.finfo(size.dtype).eps)
    return light.view(radius.shape[0], *radius.shape[2:])


def feature_robustness(radius: Tensor, *, bins: int = 20) -> FeatureRobustness:
    """Half-widths (B, ...) summed up over the inputs, value by value and as a histogram."""
    if bins < 1:
        raise InputError(f"bins must be at least 1, got {bins}")
    size = _log(radius)
    low, high = float(size.min()), float(size.max())
    edges = torch.linspace(low, high, bins + 1, dtype=size.dtype, device=size.device)
    place = torch.bucketize(size.flatten(), edges[1:-1].contiguous(), right=True)
    return FeatureRobustness(size.mean(0).exp(), torch.bincount(place, minlength=bins), edges.exp())


def similarity(radius: Tensor) -> Similarity:
    """How alike the boxes of the inputs are: cosines between their half-widths (B, ...), B >= 2."""
    if len(radius) < 2:
        raise InputError(f"similarity compares the boxes of at least 2 inputs, got {len(radius)}")
    _log(radius)
    unit = torch.nn.functional.normalize(radius.flatten(1).double(), dim=1, eps=0.0)
    matrix = (unit @ unit.T).clamp(max=1.0)
    pairs = matrix[~torch.eye(len(radius), dtype=torch.bool, device=radius.device)]
    return Similarity(float(pairs.mean()), float(pairs.min()), matrix)


def _log(radius: Tensor) -> Tensor:
    """Logarithm of half-widths, all of which must be positive: leave out inputs without a certified box."""
    bad = ~(radius.flatten(1) > 0).all(1)
    if bool(bad.any()):
        raise InputError(
            f"input {int(bad.nonzero()[0])} has half-widths that are not positive; keep only the certified inputs: "
            "result.radius[result.certified]"
        )
    return radius.log()
