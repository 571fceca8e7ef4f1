"""The slabs: a straight boundary fits them, and so does a zig-zag one with a larger margin; which has more volume?

Four slabs lie above each other in [-1, 1]^2 with gaps of 0.2, by turns to the left (class 1, x < -0.1) and to the right
(class 0, x > 0.1). The line x = 0 separates the classes with a margin of 0.1; the zig-zag line through the gaps keeps a
distance of 0.1 along y, too, and is the robust one (after Shah et al., "The pitfalls of simplicity bias in neural
networks", 2020; geometry as in the published code of Chiang et al., "Loss landscapes are all you need", 2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.analyze.volume.family import Family
from holdfast.data import Split
from holdfast.random import Noise
from holdfast.utils.options import Count

SLABS, MARGIN = 4, 0.1
UNITS, TRAIN = 40, 140
_PITCH = (2 + 2 * MARGIN) / SLABS  # from the middle of a slab to the middle of the next one
_THICKNESS = _PITCH - 2 * MARGIN


@dataclass(frozen=True, eq=False)
class Kinds:
    """Of networks that fit the slabs: which have a straight boundary, and which the zig-zag one; both (M,) bool."""

    linear: Tensor
    robust: Tensor


def slab_points(count: int = TRAIN, *, seed: int = 0) -> Split:
    """Points of the slabs, x (count, 2) and y (count,); the slabs take turns, from the top."""
    slab = torch.arange(count) % SLABS
    y = 1 - slab % 2
    across, up = Noise.for_batch(seed, count).uniform((2,)).unbind(1)
    across = MARGIN + (1 - MARGIN) * across
    middle = 1 - _THICKNESS / 2 - slab * _PITCH
    return Split(torch.stack([across * (1 - 2 * y), middle + _THICKNESS * (up - 0.5)], 1), y)


def linear_probes(count: Count = 100) -> Split:
    """Points at x = 0.1 (class 0) and x = -0.1 (class 1) that only a boundary close to x = 0 separates."""
    up = torch.linspace(-1, 1, count)
    return _on_both_sides(torch.zeros(count), up, MARGIN)


def robust_probes(count: Count = 10) -> Split:
    """Points to the right (class 0) and to the left (class 1) of the zig-zag line, 0.1 sqrt(2) away along x."""
    bottom = -1 + _THICKNESS / 2
    parts = []
    for gap in range(SLABS - 1):
        up = torch.linspace(0, _PITCH, count)
        slope = 1.0 - 2.0 * (gap % 2)  # the lowest slab is to the right, the line passes to its left
        parts.append(torch.stack([slope * (up - _PITCH / 2), bottom + gap * _PITCH + up]))
    across, up = torch.cat(parts, 1)
    return _on_both_sides(across, up, MARGIN * 2**0.5)


def kinds(family: Family, weights: Tensor) -> Kinds:
    """Sort networks by the probes that they classify right."""
    found = []
    for probes in (linear_probes(), robust_probes()):
        logits = family.logits(weights, probes.x.to(weights))
        found.append((logits.argmax(2) == probes.y.to(weights.device)).all(1))
    return Kinds(*found)


def _on_both_sides(across: Tensor, up: Tensor, shift: float) -> Split:
    x = torch.cat([torch.stack([across + shift, up], 1), torch.stack([across - shift, up], 1)])
    return Split(x, torch.arange(2).repeat_interleave(len(up)))
