"""From bounds of the margins z_y - z_j to a certificate."""

from typing import Protocol

import torch
from torch import Tensor, nn

from holdfast.bounding.core.placements import boxes
from holdfast.bounding.core.region import Region, region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import affine
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relax import Slopes
from holdfast.results import CertifyResult
from holdfast.threats import Patch, Threat


class Margins(Protocol):
    """From a network, a region and labels (B,) to lower bounds of z_y - z_j over the region, (B, K)."""

    def __call__(self, graph: Graph, r: Region, y: Tensor, *, sound: bool) -> Tensor: ...


def interval_margins(graph: Graph, r: Region, y: Tensor, *, sound: bool) -> Tensor:
    """Interval bounds of the margins, (B, K); exact on boxes and sparse sets if the network has no activation."""
    before = Graph(graph.nodes[:-1])
    relaxed = linear.relaxation(before, r, slopes=None, hidden=False, sound=sound)
    return affine.interval_margins(graph, relaxed, y)


def linear_margins(graph: Graph, r: Region, y: Tensor, *, slopes: Slopes, hidden: bool, sound: bool) -> Tensor:
    """Linear bounds of the margins, (B, K)."""
    return linear.margin_bounds(linear.relaxation(graph, r, slopes=slopes, hidden=hidden, sound=sound), y)


def certify_margins(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, name: str, margins: Margins, *, sound: bool, chunk: int = 1
) -> CertifyResult:
    """Certify the inputs whose margins are all positive over the threat set; for patches, over all locations.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs (B, ...).  y: labels (B,).
        threat: what the adversary may do.
        name: the certificate.
        margins: bounds over one region.
        sound: account for floating-point rounding.
        chunk: boxes in memory at a time, for patches.
    """
    graph = trace(model, x, threat)
    if not isinstance(threat, Patch):
        return from_margins(margins(graph, region(threat, x, sound=sound), y, sound=sound), y, name)
    worst = []
    for lower, upper, m in boxes(threat, x, sound=sound, chunk=chunk):
        box = Region(lower, upper, x.repeat_interleave(m, 0))
        found = margins(graph, box, y.repeat_interleave(m), sound=sound)
        worst.append(found.unflatten(0, (-1, m)).amin(1))
    return from_margins(torch.stack(worst).amin(0), y, name)


def from_margins(margins: Tensor, y: Tensor, name: str) -> CertifyResult:
    """The result that follows from proven margins (B, K); NaN (an overflow) proves nothing."""
    margin = margins.scatter(1, y[:, None], torch.inf).amin(1)
    margin = torch.where(margin.isnan(), torch.full_like(margin, -torch.inf), margin)
    certified = margin > 0
    return CertifyResult(certified, margin, by=tuple(name if c else "" for c in certified.tolist()))
